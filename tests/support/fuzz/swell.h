// Makes a message as large as a peer may send it, which inputs of a few hundred bytes are not.
#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace upipe::fuzz {

// Lengthens string number `which`, of those that are set and modulo their number, to `bytes`.
inline void Swell(google::protobuf::Message& message, size_t which, size_t bytes) {
  using google::protobuf::FieldDescriptor;
  std::vector<std::function<void()>> swells;
  const std::function<void(google::protobuf::Message&)> visit = [&](auto& node) {
    const auto* reflection = node.GetReflection();
    std::vector<const FieldDescriptor*> fields;
    reflection->ListFields(node, &fields);
    for (const FieldDescriptor* field : fields) {
      const int count = field->is_repeated() ? reflection->FieldSize(node, field) : 0;
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        if (!field->is_repeated()) visit(*reflection->MutableMessage(&node, field));
        for (int i = 0; i < count; ++i) visit(*reflection->MutableRepeatedMessage(&node, field, i));
      } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING && !field->is_repeated()) {
        swells.push_back([&node, reflection, field, bytes] {
          reflection->SetString(&node, field, std::string(bytes, 'x'));
        });
      } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
        swells.push_back([&node, reflection, field, bytes] {
          reflection->AddString(&node, field, std::string(bytes, 'x'));
        });
      } else if (field->is_repeated() && field->cpp_type() == FieldDescriptor::CPPTYPE_INT64) {
        swells.push_back([&node, reflection, field, bytes] {
          for (size_t i = 0; i < bytes / 8; ++i) reflection->AddInt64(&node, field, INT64_MAX);
        });
      }
    }
  };
  visit(message);
  if (!swells.empty()) swells[which % swells.size()]();
}

}  // namespace upipe::fuzz
