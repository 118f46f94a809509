// The kernels compiled for the CPU, and a table to find them by name.
#include "gpu.h"

#include <map>
#include <string>

#include "common.cuh"

bf16 round_to_bf16(float x) { return {float_to_bf16(x)}; }

#define SOURCE(name) namespace name
SOURCE(attention) {
#include "attention.cu"
#undef KERNEL
}
SOURCE(attention_backward) {
#include "attention_backward.cu"
#undef KERNEL
}
SOURCE(attention_backward_mma) {
#include "attention_backward_mma.cu"
#undef KERNEL
}
#include "hopper.cuh"
SOURCE(attention_backward_hopper) {
#include "attention_backward_hopper.cu"
}
SOURCE(attention_hopper) {
#include "attention_hopper.cu"
}
SOURCE(attention_f32_) {
#include "attention_f32.cu"
#undef KERNEL
}
SOURCE(conv_hopper) {
#include "conv_hopper.cu"
#undef KERNEL
}
SOURCE(attention_plain) {
#include "attention_plain.cu"
#undef KERNEL
}
SOURCE(attention_few_) {
#include "attention_few.cu"
#undef KERNEL
}
SOURCE(adapter) {
#include "adapter.cu"
#undef KERNELS
}
SOURCE(backward) {
#include "backward.cu"
#undef KERNELS
}
SOURCE(low_rank) {
#include "low_rank.cu"
}
SOURCE(optimizer) {
#include "optimizer.cu"
}
#include "conv.cuh"
SOURCE(conv) {
#include "conv.cu"
}
SOURCE(conv_f32_) {
#include "conv_f32.cu"
}
SOURCE(elementwise) {
#include "elementwise.cu"
#undef KERNELS
}
SOURCE(gemv_) {
#include "gemv.cu"
#undef KERNEL
}
#include "e4m3.cuh"
SOURCE(fp8) {
#include "fp8.cu"
#undef KERNELS
}
SOURCE(group_norm) {
#include "group_norm.cu"
#undef KERNELS
}
SOURCE(int8) {
#include "int8.cu"
#undef KERNEL
}
SOURCE(movement) {
#include "movement.cu"
#undef KERNELS
}
SOURCE(norm) {
#include "norm.cu"
#undef KERNELS
}
SOURCE(rope) {
#include "rope.cu"
#undef KERNELS
}
SOURCE(epilogue) {
#include "epilogue.cu"
#undef KERNEL
}

SOURCE(reduce) {
#include "reduce.cu"
}
SOURCE(softmax) {
#include "softmax.cu"
}

SOURCE(dequantize_) {
#include "dequantize.cu"
}

template <class... A, size_t... I> void apply(void (*f)(A...), void **arguments, std::index_sequence<I...>) {
    f(*(std::remove_const_t<A> *)arguments[I]...);
}
template <class... A> void apply(void (*f)(A...), void **arguments) { apply(f, arguments, std::index_sequence_for<A...>()); }
template <class... A> std::vector<size_t> sizes(void (*)(A...)) { return {sizeof(A)...}; }

std::map<std::string, Kernel> &kernels() {
#define K(space, name) {#name, Kernel{[](void **arguments) { apply(space::name, arguments); }, sizes(space::name)}},
#define BOTH(space, name) K(space, name##_f32) K(space, name##_bf16)
    static std::map<std::string, Kernel> table = {
        K(attention, attention_32) K(attention, attention_64) K(attention, attention_96) K(attention, attention_128)
        K(attention, attention_256) K(attention, attention_512)
        K(attention_hopper, attention_hopper_128) K(conv_hopper, conv_hopper_3_128) K(conv_hopper, conv_hopper_3_8)
        K(conv_hopper, conv_hopper_1_128) K(conv_hopper, conv_hopper_2_128) K(conv_hopper, fold_taps)
        K(attention_plain, attention_plain_f32_4) K(attention_plain, attention_plain_f32_16)
        K(attention_plain, attention_plain_bf16_4) K(attention_plain, attention_plain_bf16_16)
        BOTH(attention_few_, attention_few)
        K(attention_backward, attention_backward_q_f32_4) K(attention_backward, attention_backward_q_f32_16)
        K(attention_backward, attention_backward_q_bf16_4) K(attention_backward, attention_backward_q_bf16_16)
        K(attention_backward, attention_backward_kv_f32_4) K(attention_backward, attention_backward_kv_f32_16)
        K(attention_backward, attention_backward_kv_bf16_4) K(attention_backward, attention_backward_kv_bf16_16)
        K(attention_backward, attention_stats) K(attention_backward_mma, attention_backward_q_mma_64)
        K(attention_backward_mma, attention_backward_q_mma_128) K(attention_backward_mma, attention_backward_kv_mma_64)
        K(attention_backward_mma, attention_backward_kv_mma_128) K(attention_backward_hopper, attention_backward_hopper)
        K(adapter, fill_zeros) K(adapter, transpose_2) K(adapter, transpose_4) K(adapter, take_columns_2) K(adapter, take_columns_4)
        K(adapter, take_columns_16) BOTH(adapter, dropout) BOTH(adapter, mix_rows) BOTH(adapter, mix_rows_gradient)
        BOTH(adapter, column_dot) K(adapter, sum_rows) K(adapter, row_norms) BOTH(adapter, dequantize_rows)
        BOTH(backward, ada_layer_norm_backward) BOTH(backward, norm_rope_backward) BOTH(backward, norm_rope_backward_128)
        BOTH(backward, swiglu_backward)
        K(backward, squared_error)
        K(low_rank, low_rank_16) K(low_rank, low_rank_32) K(low_rank, low_rank_rows) K(low_rank, low_rank_columns)
        K(optimizer, adamw) K(optimizer, adamw_8bit) K(optimizer, prodigy_moments) K(optimizer, prodigy_update)
        K(optimizer, sum_squares) K(optimizer, sum_partials)
        K(conv, conv_plain_f32_f32) K(conv, conv_plain_bf16_bf16) K(conv, conv_plain_bf16_f32)
        K(conv, conv_tiles_bf16_128) K(conv, conv_tiles_f32_128) K(conv, conv_tiles_bf16_32) K(conv, conv_tiles_f32_32)
        K(attention_f32_, attention_f32_64) K(attention_f32_, attention_f32_128)
        K(conv_f32_, conv_f32_128) K(conv_f32_, conv_f32_64) K(conv_f32_, conv_f32_32)
        K(conv_f32_, fold_taps_f32)
        BOTH(elementwise, unary) BOTH(elementwise, binary) BOTH(elementwise, swiglu) BOTH(elementwise, affine)
        BOTH(elementwise, blend_rows)
        K(elementwise, cast_f32_bf16) K(elementwise, cast_bf16_f32) K(elementwise, cast_f16_f32) K(elementwise, cast_f16_bf16)
        K(gemv_, gemv_f32_f32_f32) K(gemv_, gemv_f32_bf16_f32) K(gemv_, gemv_f32_f16_f32)
        K(gemv_, gemv_bf16_f32_bf16) K(gemv_, gemv_bf16_bf16_bf16) K(gemv_, gemv_bf16_f16_bf16)
        K(gemv_, gemv_bf16_f32_f32) K(gemv_, gemv_bf16_bf16_f32) K(gemv_, gemv_bf16_f16_f32)
        BOTH(group_norm, group_norm_partial) BOTH(group_norm, group_norm_partial_vector) BOTH(group_norm, group_norm_apply)
        BOTH(group_norm, group_norm_apply_vector) K(group_norm, group_norm_merge)
        BOTH(fp8, quantize_fp8) BOTH(fp8, quantize_swiglu_fp8) BOTH(fp8, gemm_fp8) BOTH(fp8, rescale_fp8)
        BOTH(fp8, quantize_gradient_fp8) K(fp8, transpose_fp8)
        BOTH(int8, quantize_int8) BOTH(int8, gemm_int8)
        K(movement, copy_columns_2) K(movement, copy_columns_4) K(movement, copy_columns_16)
        BOTH(movement, to_bytes) K(movement, upsample) K(movement, space_to_depth_2) K(movement, space_to_depth_4)
        BOTH(norm, ada_layer_norm) BOTH(norm, rms_norm) BOTH(rope, norm_rope) BOTH(rope, norm_rope_128)
        BOTH(norm, ada_layer_norm_registers) BOTH(norm, ada_layer_norm_fp8) BOTH(norm, rms_norm_registers)
        BOTH(dequantize_, dequantize) BOTH(softmax, softmax_rows) BOTH(reduce, l1_partial) K(reduce, relative_l1) K(epilogue, epilogue_f32_f32) K(epilogue, epilogue_f32_bf16) K(epilogue, epilogue_bf16_bf16)
    };
    return table;
}
