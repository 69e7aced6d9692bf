#pragma once

#include <fsdp/average.h>
#include <fsdp/call.h>
#include <fsdp/checkpoint.h>
#include <fsdp/clip_grad_norm.h>
#include <fsdp/clone.h>
#include <fsdp/describe.h>
#include <fsdp/error.h>
#include <fsdp/fully_shard.h>
#include <fsdp/group.h>
#include <fsdp/init.h>
#include <fsdp/mesh.h>
#include <fsdp/optim.h>
#include <fsdp/policy.h>
#include <fsdp/sharded_tensor.h>
#include <fsdp/summon.h>
#include <fsdp/trace.h>
