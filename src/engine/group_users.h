#pragma once

#include <fsdp/group.h>

namespace fsdp::engine {

class Unit;

/// What the units of one rank, also those of different roots, do with a group's memory. Thread safe; a group's writers
/// belong to one thread at a time, but units may go on any.
namespace group_users {

/// The unit has begun to gather in place: its handles point into memory that other ranks write.
void begin_reading(Group& group, Unit& unit);
void end_reading(Group& group, Unit& unit);
/// Before this rank begins to write its own part, and so tells the others that it is done reading: reshards all units
/// that read in place, so that their next touch waits for the others' writes.
void stop_readers(Group& group);

/// Shards may be written with no word to anybody until as many have said that this is over as have said that it begins:
/// one root's next step says nothing of the shards of another.
void begin_unseen_writes(Group& group, const ExpectedWrites& expected, const Label& label);
void end_unseen_writes(Group& group);
/// Who was to end them is gone.
void forget_unseen_writes(Group& group);

/// A unit of the group is going away.
void forget(Group& group, Unit& unit);

} // namespace group_users

} // namespace fsdp::engine
