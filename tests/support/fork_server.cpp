#include "support/fork_server.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace fsdp::testing {
namespace {

int server = -1; // the program's end of the connection

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

/// False at the end of the stream.
bool receive(int from, void* bytes, size_t count) {
  return count == 0 || recv(from, bytes, count, MSG_WAITALL) == static_cast<ssize_t>(count);
}

void send_all(int to, const void* bytes, size_t count) {
  for (size_t sent = 0; sent < count;) {
    const ssize_t more = send(to, static_cast<const char*>(bytes) + sent, count - sent, MSG_NOSIGNAL);
    if (more < 0 && errno != EINTR) {
      fail("send");
    }
    sent += more > 0 ? static_cast<size_t>(more) : 0;
  }
}

void send_strings(int to, const std::vector<std::string>& strings) {
  const size_t count = strings.size();
  send_all(to, &count, sizeof(count));
  for (const std::string& string : strings) {
    const size_t length = string.size();
    send_all(to, &length, sizeof(length));
    send_all(to, string.data(), length);
  }
}

bool receive_strings(int from, std::vector<std::string>& strings) {
  size_t count = 0;
  if (!receive(from, &count, sizeof(count))) {
    return false;
  }
  strings.resize(count);
  for (std::string& string : strings) {
    size_t length = 0;
    if (!receive(from, &length, sizeof(length))) {
      return false;
    }
    string.resize(length);
    if (!receive(from, string.data(), length)) {
      return false;
    }
  }
  return true;
}

/// The caller's whole environment, with the given values.
std::vector<std::string> environment_with(const std::map<std::string, std::string>& values) {
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    all.emplace_back(*entry);
  }
  for (const auto& [name, value] : values) {
    all.push_back(name + "=" + value); // of two, the last one counts
  }
  return all;
}

void set_environment(const std::vector<std::string>& entries) {
  clearenv();
  for (const std::string& entry : entries) {
    const size_t equals = entry.find('=', 1);
    setenv(entry.substr(0, equals).c_str(), entry.substr(equals + 1).c_str(), /*overwrite=*/1);
  }
}

/// What is mapped later lies elsewhere in each process, as it does in programs that were started anew: an address that
/// one wrote where others read it is of no use to them here either.
void map_elsewhere() {
  const size_t different = (static_cast<size_t>(getpid()) % 1024 + 1) << 24;
  mmap(nullptr, different, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

struct Request {
  std::vector<std::string> arguments, environment, output;

  bool receive(int from) {
    return receive_strings(from, arguments) && receive_strings(from, environment) && receive_strings(from, output);
  }
};

/// In the new process, whose parent ends: then the program is its parent.
void become(const Request& request, pid_t program, pid_t parent) {
  while (getppid() == parent) {
    sched_yield();
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int output = open(request.output.at(0).c_str(), O_WRONLY | O_APPEND);
  if (getppid() != program || output < 0) {
    _exit(127);
  }
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  close(output);
  set_environment(request.environment);
  map_elsewhere();
}

/// Returns in new processes only.
std::vector<std::string> serve(int program_socket, pid_t program) {
  for (Request request; request.receive(program_socket);) {
    const pid_t parent = fork();
    if (parent == 0) {
      const pid_t middle = getpid();
      const pid_t child = fork();
      if (child == 0) {
        close(program_socket);
        become(request, program, middle);
        return request.arguments;
      }
      send_all(program_socket, &child, sizeof(child));
      _exit(0);
    }
    waitpid(parent, nullptr, 0);
    const char done = 0; // the child is the program's now
    send_all(program_socket, &done, sizeof(done));
  }
  _exit(0);
}

} // namespace

void start_fork_server(std::vector<std::string>& arguments) {
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    fail("socketpair");
  }
  const pid_t program = getpid();
  const pid_t forked = fork();
  if (forked < 0) {
    fail("fork");
  }
  if (forked == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(ends[0]);
    arguments = serve(ends[1], program);
    return;
  }
  close(ends[1]);
  server = ends[0];
  prctl(PR_SET_CHILD_SUBREAPER, 1); // what the server's children leave behind is adopted here
}

pid_t start_child(const ChildStart& start) {
  if (server < 0) {
    throw std::logic_error("start_fork_server was not called, or this is a child itself");
  }
  send_strings(server, start.arguments);
  send_strings(server, environment_with(start.environment));
  send_strings(server, {"/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(start.output)});
  pid_t child = -1;
  char done = 0;
  if (!receive(server, &child, sizeof(child)) || child < 0 || !receive(server, &done, sizeof(done))) {
    throw std::runtime_error("the process that forks children has ended");
  }
  return child;
}

} // namespace fsdp::testing
