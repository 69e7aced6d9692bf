#pragma once

/// Marks what libfsdp.so exports; everything else is hidden.
#define FSDP_API __attribute__((visibility("default")))
