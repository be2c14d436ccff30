#include "bind/bind.h"

namespace kdt {

void bind_engine(nanobind::module_&) {}

}  // namespace kdt
