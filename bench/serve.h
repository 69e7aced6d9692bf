#pragma once

#include <chrono>
#include <functional>
#include <iostream>
#include <map>
#include <string>

#include <nlohmann/json.hpp>

namespace bench {

using Json = nlohmann::json;
using Commands = std::map<std::string, std::function<Json(const Json&)>>;

/// Does what the driver asks for, a line of JSON each, until it closes the pipe. bench/serve.py is the same in Python.
inline void serve(const Commands& commands) {
  std::cout << "REPLY \"ready\"" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    const Json request = Json::parse(line);
    std::cout << "REPLY " << commands.at(request.at("do").get<std::string>())(request) << std::endl;
  }
}

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

} // namespace bench
