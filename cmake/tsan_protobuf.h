// Included before everything else under ThreadSanitizer: there map_field.h declares a MapFieldBase
// that is larger than the one Debian's libprotobuf was built with, and maps read wild memory.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#pragma push_macro("__SANITIZE_THREAD__")
#undef __SANITIZE_THREAD__
#include <google/protobuf/map_field.h>
#pragma pop_macro("__SANITIZE_THREAD__")
