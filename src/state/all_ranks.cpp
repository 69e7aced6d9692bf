#include "state/all_ranks.h"

#include <exception>

#include "base/check.h"
#include "engine/bucket.h"

namespace fsdp::state {

namespace {

std::string packed(const std::vector<std::string>& texts) {
  std::string all;
  for (const auto& text : texts) {
    all += std::to_string(text.size()) + ":" + text;
  }
  return all;
}

std::vector<std::string> unpacked(const std::string& all) {
  std::vector<std::string> texts;
  for (size_t at = 0; at < all.size(); at += texts.back().size()) {
    const size_t colon = all.find(':', at);
    texts.push_back(all.substr(colon + 1, std::stoull(all.substr(at, colon - at))));
    at = colon + 1;
  }
  return texts;
}

} // namespace

std::string text_or_reason(const std::function<std::string()>& body) {
  try {
    return '+' + body();
  } catch (const std::exception& error) {
    return '-' + std::string(error.what());
  }
}

std::string text_in(const std::string& told) {
  FSDP_CHECK(told.rfind('-', 0) != 0, "{}", told.substr(1));
  return told.substr(1);
}

std::vector<std::string> from_all_ranks(const std::optional<Mesh>& mesh, const std::string& mine, const Label& label) {
  std::vector<std::string> all{mine};
  for (int dim = mesh ? mesh->ndim() - 1 : -1; dim >= 0; --dim) {
    const auto of_groups = mesh->group(dim)->exchange(packed(all), label);
    all.clear();
    for (const auto& of_group : of_groups) {
      const auto texts = unpacked(of_group);
      all.insert(all.end(), texts.begin(), texts.end());
    }
  }
  return all;
}

void check_on_all_ranks(const std::optional<Mesh>& mesh, const Label& label, const std::function<void()>& check) {
  const auto mine = text_or_reason([&] {
    check();
    return std::string();
  });
  for (const auto& told : from_all_ranks(mesh, mine, label)) {
    text_in(told);
  }
}

std::optional<Mesh> mesh_of(const std::vector<NamedTensor>& tensors, const char* operation) {
  std::optional<Mesh> all;
  for (const auto& tensor : tensors) {
    if (tensor.param == nullptr) {
      continue;
    }
    const Mesh& mesh = tensor.param->bucket().mesh();
    FSDP_CHECK(
        !all || *all == mesh,
        "[{}] values go from rank to rank only where all parameters are on one mesh, but these lie on {} and {}: give "
        "whole values (full_state_dict's, full_optim_state_dict's) on every rank",
        operation,
        all->str(),
        mesh.str());
    all = mesh;
  }
  return all;
}

} // namespace fsdp::state
