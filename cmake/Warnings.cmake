# One interface target carries every compile option: no global flags.
# -ffp-contract=off: an fma happens where the source says so and nowhere else (docs/numerics.md).
add_library(kdt_options INTERFACE)
target_compile_options(kdt_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -ffp-contract=off -fno-math-errno>)
target_include_directories(kdt_options INTERFACE ${CMAKE_SOURCE_DIR}/cpp)
find_package(Threads REQUIRED)
target_link_libraries(kdt_options INTERFACE Threads::Threads)
if(KDTREE_SANITIZE)
  target_compile_options(kdt_options INTERFACE -fsanitize=address,undefined -fno-sanitize-recover=undefined -g)
  target_link_options(kdt_options INTERFACE -fsanitize=address,undefined)
endif()
