#include "bind/bind.h"

namespace kdt {

void bind_kdtr(nanobind::module_&) {}

}  // namespace kdt
