// The byte tokenizer: tokens 0-255 are the bytes of the text, 256 is the marker that precedes each
// document. There is nothing to train and nothing to load, so two constants are the whole of it.
#pragma once

#include <cstdint>

namespace upipe::data {

// Printed as "<doc>". Every document of a shard begins with it.
inline constexpr uint16_t kDocumentMarker = 256;

// The smallest vocabulary a model may have; it may pad its embedding to more rows.
inline constexpr uint32_t kByteVocabSize = 257;

}  // namespace upipe::data
