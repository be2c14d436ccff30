#include "bind/bind.h"

namespace kdt {

void bind_ops(nanobind::module_&) {}

}  // namespace kdt
