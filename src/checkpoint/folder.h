#pragma once

#include <string>
#include <vector>

/// Folders of checkpoints. Errors name the path.
namespace fsdp::disk {

/// And those above it; returns once their names are on the disk. No error if it is there.
void make_folders(const std::string& path);
/// From the root on.
std::string from_root(const std::string& path);
/// Likewise, without "." and "..", to be compared: links are not followed.
std::string plain_path(const std::string& path);
/// What lies in it, sorted; nothing if there is no such folder.
std::vector<std::string> names_in(const std::string& path);
bool is_file(const std::string& path); ///< and no link
bool is_folder(const std::string& path);
bool exists(const std::string& path);
/// Returns once the names of what lies in it are on the disk.
void flush_folder(const std::string& path);
/// All at once: whoever looks finds it under one name or the other, also after a crash.
void rename_path(const std::string& from, const std::string& to);
void remove_file(const std::string& path);
/// With all that lies in it, but not what links point to: of a link, that alone. No error if there is none.
void remove_folder_tree(const std::string& path);

} // namespace fsdp::disk
