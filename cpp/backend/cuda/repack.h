// Weights from the order of files into the device's layout, on the device.
#pragma once

#include "backend/cuda/gemm.h"

namespace kdt::cuda {

struct RepackArgs {
    const unsigned char* data;    // rows [first_row, first_row + rows) as the file stores them
    const unsigned char* scales;  // w4a16: likewise
    int first_row, rows;          // first_row is a multiple of 16
    int out, in;
    bool f32_scales;
    unsigned char* to;  // the whole matrix
    int32_t* bad_row;   // lowered to the first row with a value that is not finite
};

void launch_repack(const GemmLaunch& l, WeightKind kind, const RepackArgs& args);

}  // namespace kdt::cuda
