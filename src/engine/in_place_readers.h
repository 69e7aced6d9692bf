#pragma once

#include <fsdp/group.h>

namespace fsdp::engine {

class Unit;

/// The units whose handles point into memory that other ranks write. Before this rank begins to write its own part, and
/// so tells the others that it is done reading, all of them on the same group are resharded: the next touch waits for
/// the others' writes. Thread safe; units of one group belong to one rank, hence to one thread at a time.
namespace in_place_readers {
/// The unit has begun to gather in place.
void enter(Group& group, Unit& unit);
void leave(Group& group, Unit& unit);
/// Reshards all of the group's readers.
void stop(Group& group);
/// The group is going away.
void forget(Group& group);
} // namespace in_place_readers

} // namespace fsdp::engine
