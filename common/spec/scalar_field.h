// How a single value of a JobSpec or a DeviceFile is spelled: protobuf scalar field to text and
// back. Token counts take K and M, memory takes KiB to TiB, enums are short lower-case names.
#pragma once

#include <google/protobuf/message.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace upipe {

// Sets `field` of `message` from `text`; `quoted` when the file had it in quotes. InvalidArgument
// says what is wrong with the text, without the field's path.
absl::Status SetScalarField(const google::protobuf::FieldDescriptor& field, absl::string_view text,
                            bool quoted, google::protobuf::Message& message);

// The YAML scalar SetScalarField reads back to the same value, quotes included where needed.
std::string ScalarFieldText(const google::protobuf::Message& message,
                            const google::protobuf::FieldDescriptor& field);

// A text as such a scalar, quotes included where needed.
std::string TextScalar(const std::string& text);

// "; did you mean 'x'?" for the nearest of `names`, or "; known: a, b, c" when none is near.
std::string NearestName(absl::string_view word, const std::vector<std::string>& names);

}  // namespace upipe
