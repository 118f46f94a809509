//! All kernels by source file: parameters and names.

use std::ffi::c_void;

use super::arguments::{
    AdamWArgs, AttentionArgs, AttentionBackwardArgs, ConvArgs, GradientArgs, HopperAttentionArgs,
    HopperAttentionBackwardArgs, HopperConvArgs, LowRankArgs, MmaAttentionBackwardArgs, PackedMatrixArgs,
    ProdigyArgs,
};
#[cfg(test)]
use super::kernel::KernelArgument;
use super::kernel::{Kernel, Parameters, pointer};
use crate::sources;
use crate::sys::driver::DevicePtr;

/// A kernel's source file, name and parameters.
#[cfg(test)]
pub(super) struct Signature {
    pub source: &'static sources::KernelSource,
    pub name: &'static str,
    pub parameters: &'static [(&'static str, &'static str)],
}

macro_rules! kernels {
    ($($SOURCE:ident {
        $($Parameters:ident($($field:ident: $type:ty),*): $($KERNEL:ident = $name:literal),*;)*
    })*) => {
        $($(
            pub(crate) struct $Parameters {
                $(pub $field: $type,)*
            }

            impl Parameters for $Parameters {
                #[cfg(test)]
                const LIST: &'static [(&'static str, &'static str)] =
                    &[$((stringify!($field), <$type as KernelArgument>::TYPE)),*];

                fn with_pointers<T>(&self, call: impl FnOnce(&mut [*mut c_void]) -> T) -> T {
                    call(&mut [$(pointer(&self.$field)),*])
                }
            }

            $(pub(crate) const $KERNEL: Kernel<$Parameters> = Kernel::new(&sources::$SOURCE, $name);)*
        )*)*

        #[cfg(test)]
        pub(super) const SIGNATURES: &[Signature] = &[
            $($($(
                Signature { source: &sources::$SOURCE, name: $name, parameters: $Parameters::LIST },
            )*)*)*
        ];
    };
}

kernels! {
    ADAPTER {
        Transpose(x: DevicePtr, out: DevicePtr, rows: i32, cols: i32):
            TRANSPOSE_2 = "transpose_2", TRANSPOSE_4 = "transpose_4";
        FillZeros(x: DevicePtr, n: i64):
            FILL_ZEROS = "fill_zeros";
        TakeColumns(x: DevicePtr, out: DevicePtr, rows: i64, width: i32, column: i32, x_width: i32):
            TAKE_COLUMNS_2 = "take_columns_2", TAKE_COLUMNS_4 = "take_columns_4",
            TAKE_COLUMNS_16 = "take_columns_16";
        Dropout(x: DevicePtr, out: DevicePtr, n: i64, rate: f32, factor: f32, seed: i64):
            DROPOUT_F32 = "dropout_f32", DROPOUT_BF16 = "dropout_bf16";
        MixRows(x: DevicePtr, a: DevicePtr, out: DevicePtr, n: i64, from: i32, to: i32, dim: i32, row_stride: i32,
            column_stride: i32):
            MIX_ROWS_F32 = "mix_rows_f32", MIX_ROWS_BF16 = "mix_rows_bf16";
        MixRowsGradient(dy: DevicePtr, x: DevicePtr, add: DevicePtr, out: DevicePtr, blocks: i64, rows: i32, cols:
            i32, dim: i32, scale: f32):
            MIX_ROWS_GRADIENT_F32 = "mix_rows_gradient_f32", MIX_ROWS_GRADIENT_BF16 = "mix_rows_gradient_bf16";
        ColumnDot(x: DevicePtr, y: DevicePtr, partials: DevicePtr, rows: i32, dim: i32, rows_per_block: i32):
            COLUMN_DOT_F32 = "column_dot_f32", COLUMN_DOT_BF16 = "column_dot_bf16";
        SumRows(partials: DevicePtr, add: DevicePtr, out: DevicePtr, count: i32, dim: i32):
            SUM_ROWS = "sum_rows";
        RowNorms(x: DevicePtr, out: DevicePtr, dim: i32):
            ROW_NORMS = "row_norms";
        DequantizeRows(x: DevicePtr, scales: DevicePtr, out: DevicePtr, rows: i64, cols: i32, depth: i32, fp8: i32):
            DEQUANTIZE_ROWS_F32 = "dequantize_rows_f32", DEQUANTIZE_ROWS_BF16 = "dequantize_rows_bf16";
    }
    ATTENTION {
        AttentionTiled(args: AttentionArgs):
            ATTENTION_32 = "attention_32", ATTENTION_64 = "attention_64",
            ATTENTION_96 = "attention_96", ATTENTION_128 = "attention_128",
            ATTENTION_256 = "attention_256", ATTENTION_512 = "attention_512";
    }
    ATTENTION_BACKWARD {
        AttentionBackward(args: AttentionBackwardArgs):
            ATTENTION_BACKWARD_Q_F32_4 = "attention_backward_q_f32_4",
            ATTENTION_BACKWARD_Q_F32_16 = "attention_backward_q_f32_16",
            ATTENTION_BACKWARD_Q_BF16_4 = "attention_backward_q_bf16_4",
            ATTENTION_BACKWARD_Q_BF16_16 = "attention_backward_q_bf16_16",
            ATTENTION_BACKWARD_KV_F32_4 = "attention_backward_kv_f32_4",
            ATTENTION_BACKWARD_KV_F32_16 = "attention_backward_kv_f32_16",
            ATTENTION_BACKWARD_KV_BF16_4 = "attention_backward_kv_bf16_4",
            ATTENTION_BACKWARD_KV_BF16_16 = "attention_backward_kv_bf16_16";
        AttentionStats(dout: DevicePtr, out: DevicePtr, lse: DevicePtr, stats: DevicePtr, queries: i32, heads: i32,
            dim: i32, padded: i32):
            ATTENTION_STATS = "attention_stats";
    }
    ATTENTION_BACKWARD_HOPPER {
        AttentionBackwardHopper(args: HopperAttentionBackwardArgs):
            ATTENTION_BACKWARD_HOPPER = "attention_backward_hopper";
    }
    ATTENTION_BACKWARD_MMA {
        AttentionBackwardMma(args: MmaAttentionBackwardArgs):
            ATTENTION_BACKWARD_Q_MMA_64 = "attention_backward_q_mma_64",
            ATTENTION_BACKWARD_Q_MMA_128 = "attention_backward_q_mma_128",
            ATTENTION_BACKWARD_KV_MMA_64 = "attention_backward_kv_mma_64",
            ATTENTION_BACKWARD_KV_MMA_128 = "attention_backward_kv_mma_128";
    }
    ATTENTION_F32 {
        AttentionF32(args: AttentionArgs):
            ATTENTION_F32_64 = "attention_f32_64", ATTENTION_F32_128 = "attention_f32_128";
    }
    ATTENTION_FEW {
        AttentionFew(args: AttentionArgs, partials: DevicePtr, done: DevicePtr, splits: i32):
            ATTENTION_FEW_F32 = "attention_few_f32", ATTENTION_FEW_BF16 = "attention_few_bf16";
    }
    ATTENTION_HOPPER {
        AttentionHopper(args: HopperAttentionArgs):
            ATTENTION_HOPPER_128 = "attention_hopper_128";
    }
    ATTENTION_PLAIN {
        AttentionPlain(args: AttentionArgs):
            ATTENTION_PLAIN_F32_4 = "attention_plain_f32_4",
            ATTENTION_PLAIN_F32_16 = "attention_plain_f32_16",
            ATTENTION_PLAIN_BF16_4 = "attention_plain_bf16_4",
            ATTENTION_PLAIN_BF16_16 = "attention_plain_bf16_16";
    }
    BACKWARD {
        AdaLayerNormBackward(dy: DevicePtr, x: DevicePtr, scale: DevicePtr, add: DevicePtr, dx: DevicePtr, dim: i32,
            eps: f32):
            ADA_LAYER_NORM_BACKWARD_F32 = "ada_layer_norm_backward_f32",
            ADA_LAYER_NORM_BACKWARD_BF16 = "ada_layer_norm_backward_bf16";
        NormRopeBackward(dy: DevicePtr, x: DevicePtr, weight: DevicePtr, cosines: DevicePtr, sines: DevicePtr, dx:
            DevicePtr, tokens: i64, heads: i32, head_dim: i32, halves: i32, eps: f32):
            NORM_ROPE_BACKWARD_F32 = "norm_rope_backward_f32", NORM_ROPE_BACKWARD_BF16 = "norm_rope_backward_bf16";
        NormRopeBackward128(dy: DevicePtr, x: DevicePtr, weight: DevicePtr, cosines: DevicePtr, sines: DevicePtr, dx:
            DevicePtr, tokens: i64, heads: i32, halves: i32, eps: f32):
            NORM_ROPE_BACKWARD_128_F32 = "norm_rope_backward_128_f32",
            NORM_ROPE_BACKWARD_128_BF16 = "norm_rope_backward_128_bf16";
        SwigluBackward(dy: DevicePtr, left_cols: i32, x: DevicePtr, d_left: DevicePtr, dx: DevicePtr, rows: i64, cols:
            i32):
            SWIGLU_BACKWARD_F32 = "swiglu_backward_f32", SWIGLU_BACKWARD_BF16 = "swiglu_backward_bf16";
        SquaredError(x: DevicePtr, y: DevicePtr, dx: DevicePtr, partials: DevicePtr, n: i64, per_block: i64, scale:
            f32):
            SQUARED_ERROR = "squared_error";
    }
    CONV {
        ConvPlain(args: ConvArgs):
            CONV_PLAIN_F32_F32 = "conv_plain_f32_f32",
            CONV_PLAIN_BF16_BF16 = "conv_plain_bf16_bf16",
            CONV_PLAIN_BF16_F32 = "conv_plain_bf16_f32";
        ConvTiles(args: ConvArgs):
            CONV_TILES_BF16_128 = "conv_tiles_bf16_128", CONV_TILES_F32_128 = "conv_tiles_f32_128",
            CONV_TILES_BF16_32 = "conv_tiles_bf16_32", CONV_TILES_F32_32 = "conv_tiles_f32_32";
    }
    CONV_F32 {
        FoldTapsF32(w: DevicePtr, out: DevicePtr, n: i32, channels: i32):
            FOLD_TAPS_F32 = "fold_taps_f32";
        ConvF32(args: ConvArgs):
            CONV_F32_128 = "conv_f32_128", CONV_F32_64 = "conv_f32_64", CONV_F32_32 = "conv_f32_32";
    }
    CONV_HOPPER {
        FoldTaps(w: DevicePtr, out: DevicePtr, n: i32, channels: i32):
            FOLD_TAPS = "fold_taps";
        ConvHopper(args: HopperConvArgs):
            CONV_HOPPER_3_128 = "conv_hopper_3_128", CONV_HOPPER_3_8 = "conv_hopper_3_8",
            CONV_HOPPER_2_128 = "conv_hopper_2_128", CONV_HOPPER_1_128 = "conv_hopper_1_128";
    }
    ELEMENTWISE {
        Unary(x: DevicePtr, out: DevicePtr, n: i64, f: i32):
            UNARY_F32 = "unary_f32", UNARY_BF16 = "unary_bf16";
        Binary(x: DevicePtr, y: DevicePtr, out: DevicePtr, n: i64, f: i32, s: f32):
            BINARY_F32 = "binary_f32", BINARY_BF16 = "binary_bf16";
        Swiglu(left: DevicePtr, left_cols: i32, x: DevicePtr, out: DevicePtr, rows: i64, cols: i32):
            SWIGLU_F32 = "swiglu_f32", SWIGLU_BF16 = "swiglu_bf16";
        Affine(x: DevicePtr, scale: DevicePtr, shift: DevicePtr, out: DevicePtr, rows: i64, cols: i32):
            AFFINE_F32 = "affine_f32", AFFINE_BF16 = "affine_bf16";
        BlendRows(x: DevicePtr, y: DevicePtr, mask: DevicePtr, out: DevicePtr, rows: i64, cols: i32):
            BLEND_ROWS_F32 = "blend_rows_f32", BLEND_ROWS_BF16 = "blend_rows_bf16";
        Cast(x: DevicePtr, out: DevicePtr, n: i64):
            CAST_F32_BF16 = "cast_f32_bf16", CAST_BF16_F32 = "cast_bf16_f32",
            CAST_F16_F32 = "cast_f16_f32", CAST_F16_BF16 = "cast_f16_bf16";
    }
    GEMV {
        Gemv(x: DevicePtr, ldx: i64, w: DevicePtr, ldw: i64, rows: i32, k: i32, n: i32, alpha: f32, bias:
            DevicePtr, add: DevicePtr, ldadd: i64, out: DevicePtr, ldo: i64):
            GEMV_F32_F32_F32 = "gemv_f32_f32_f32",
            GEMV_F32_BF16_F32 = "gemv_f32_bf16_f32",
            GEMV_F32_F16_F32 = "gemv_f32_f16_f32",
            GEMV_BF16_F32_BF16 = "gemv_bf16_f32_bf16",
            GEMV_BF16_BF16_BF16 = "gemv_bf16_bf16_bf16",
            GEMV_BF16_F16_BF16 = "gemv_bf16_f16_bf16",
            GEMV_BF16_F32_F32 = "gemv_bf16_f32_f32",
            GEMV_BF16_BF16_F32 = "gemv_bf16_bf16_f32",
            GEMV_BF16_F16_F32 = "gemv_bf16_f16_f32";
    }
    FP8 {
        QuantizeFp8(x: DevicePtr, x_cols: i32, y: DevicePtr, y_cols: i32, q: DevicePtr, scales: DevicePtr,
            padded: i32):
            QUANTIZE_FP8_F32 = "quantize_fp8_f32", QUANTIZE_FP8_BF16 = "quantize_fp8_bf16";
        QuantizeSwigluFp8(x: DevicePtr, x_cols: i32, y: DevicePtr, y_cols: i32, q: DevicePtr, scales:
            DevicePtr, padded: i32):
            QUANTIZE_SWIGLU_FP8_F32 = "quantize_swiglu_fp8_f32",
            QUANTIZE_SWIGLU_FP8_BF16 = "quantize_swiglu_fp8_bf16";
        QuantizeGradientFp8(args: GradientArgs):
            QUANTIZE_GRADIENT_FP8_F32 = "quantize_gradient_fp8_f32",
            QUANTIZE_GRADIENT_FP8_BF16 = "quantize_gradient_fp8_bf16";
        TransposeFp8(x: DevicePtr, out: DevicePtr, scales: DevicePtr, rows: i32, cols: i32, depth: i32, out_depth: i32):
            TRANSPOSE_FP8 = "transpose_fp8";
        GemmFp8(x: DevicePtr, x_scales: DevicePtr, w: DevicePtr, w_scales: DevicePtr, out: DevicePtr,
            rows: i32, n: i32, depth: i32):
            GEMM_FP8_F32 = "gemm_fp8_f32", GEMM_FP8_BF16 = "gemm_fp8_bf16";
        RescaleFp8(out: DevicePtr, x_scales: DevicePtr, w_scales: DevicePtr, rows: i64, n: i32):
            RESCALE_FP8_F32 = "rescale_fp8_f32", RESCALE_FP8_BF16 = "rescale_fp8_bf16";
    }
    GROUP_NORM {
        GroupNormMerge(partials: DevicePtr, stats: DevicePtr, count: i32, groups: i32, eps: f32):
            GROUP_NORM_MERGE = "group_norm_merge";
        GroupNormPartial(x: DevicePtr, partials: DevicePtr, pixels: i64, channels: i32, groups: i32, pixels_per_block: i32):
            GROUP_NORM_PARTIAL_F32 = "group_norm_partial_f32", GROUP_NORM_PARTIAL_BF16 = "group_norm_partial_bf16";
        GroupNormApply(x: DevicePtr, stats: DevicePtr, weight: DevicePtr, bias: DevicePtr, out: DevicePtr,
            pixels: i64, channels: i32, width: i32, f: i32):
            GROUP_NORM_APPLY_F32 = "group_norm_apply_f32", GROUP_NORM_APPLY_BF16 = "group_norm_apply_bf16";
        GroupNormPartialVector(x: DevicePtr, partials: DevicePtr, pixels: i64, chunks: i32, channels: i32, groups:
            i32):
            GROUP_NORM_PARTIAL_VECTOR_F32 = "group_norm_partial_vector_f32",
            GROUP_NORM_PARTIAL_VECTOR_BF16 = "group_norm_partial_vector_bf16";
        GroupNormApplyVector(x: DevicePtr, stats: DevicePtr, weight: DevicePtr, bias: DevicePtr, out: DevicePtr,
            pixels: i64, chunks: i32, channels: i32, width: i32, f: i32):
            GROUP_NORM_APPLY_VECTOR_F32 = "group_norm_apply_vector_f32",
            GROUP_NORM_APPLY_VECTOR_BF16 = "group_norm_apply_vector_bf16";
    }
    INT8 {
        QuantizeInt8(x: DevicePtr, q: DevicePtr, scales: DevicePtr, cols: i32, padded: i32):
            QUANTIZE_INT8_F32 = "quantize_int8_f32", QUANTIZE_INT8_BF16 = "quantize_int8_bf16";
        GemmInt8(q: DevicePtr, q_scales: DevicePtr, w: DevicePtr, w_scales: DevicePtr, bias: DevicePtr,
            add: DevicePtr, out: DevicePtr, rows: i32, n: i32, depth: i32, ldadd: i64, ldo: i64):
            GEMM_INT8_F32 = "gemm_int8_f32", GEMM_INT8_BF16 = "gemm_int8_bf16";
    }
    MOVEMENT {
        Upsample(x: DevicePtr, out: DevicePtr, h: i32, w: i32, c: i32):
            UPSAMPLE = "upsample";
        ToBytes(x: DevicePtr, out: DevicePtr, n: i64, scale: f32, shift: f32):
            TO_BYTES_F32 = "to_bytes_f32", TO_BYTES_BF16 = "to_bytes_bf16";
        CopyColumns(x: DevicePtr, out: DevicePtr, rows: i64, width: i32, column: i32, out_width: i32):
            COPY_COLUMNS_2 = "copy_columns_2", COPY_COLUMNS_4 = "copy_columns_4",
            COPY_COLUMNS_16 = "copy_columns_16";
        SpaceToDepth(x: DevicePtr, out: DevicePtr, h: i32, w: i32, c: i32, inverse: i32):
            SPACE_TO_DEPTH_2 = "space_to_depth_2", SPACE_TO_DEPTH_4 = "space_to_depth_4";
    }
    NORM {
        AdaLayerNorm(x: DevicePtr, scale: DevicePtr, shift: DevicePtr, out: DevicePtr, dim: i32, eps: f32):
            ADA_LAYER_NORM_F32 = "ada_layer_norm_f32", ADA_LAYER_NORM_BF16 = "ada_layer_norm_bf16";
        RmsNorm(x: DevicePtr, weight: DevicePtr, out: DevicePtr, dim: i32, eps: f32):
            RMS_NORM_F32 = "rms_norm_f32", RMS_NORM_BF16 = "rms_norm_bf16";
        AdaLayerNormRegisters(x: DevicePtr, scale: DevicePtr, shift: DevicePtr, out: DevicePtr, rows: i32, dim:
            i32, eps: f32):
            ADA_LAYER_NORM_REGISTERS_F32 = "ada_layer_norm_registers_f32",
            ADA_LAYER_NORM_REGISTERS_BF16 = "ada_layer_norm_registers_bf16";
        AdaLayerNormFp8(x: DevicePtr, scale: DevicePtr, shift: DevicePtr, q: DevicePtr, scales: DevicePtr,
            rows: i32, dim: i32, padded: i32, eps: f32):
            ADA_LAYER_NORM_FP8_F32 = "ada_layer_norm_fp8_f32",
            ADA_LAYER_NORM_FP8_BF16 = "ada_layer_norm_fp8_bf16";
        RmsNormRegisters(x: DevicePtr, weight: DevicePtr, out: DevicePtr, rows: i32, dim: i32, eps: f32):
            RMS_NORM_REGISTERS_F32 = "rms_norm_registers_f32", RMS_NORM_REGISTERS_BF16 = "rms_norm_registers_bf16";
    }
    LOW_RANK {
        LowRankProducts(args: LowRankArgs):
            LOW_RANK_16 = "low_rank_16", LOW_RANK_32 = "low_rank_32";
        LowRankRows(partials: DevicePtr, out: DevicePtr, n: i64, count: i32, scale: f32):
            LOW_RANK_ROWS = "low_rank_rows";
        LowRankColumns(partials: DevicePtr, add: DevicePtr, out: DevicePtr, cols: i32, rank: i32, count: i32, scale: f32,
            by_rank: i32):
            LOW_RANK_COLUMNS = "low_rank_columns";
    }
    OPTIMIZER {
        AdamW(args: AdamWArgs, tensors: DevicePtr, count: i32, per_block: i32):
            ADAMW = "adamw";
        AdamW8Bit(args: AdamWArgs, tensors: DevicePtr, count: i32, books: DevicePtr):
            ADAMW_8BIT = "adamw_8bit";
        ProdigyMoments(args: ProdigyArgs, tensors: DevicePtr, count: i32, per_block: i32, partials: DevicePtr):
            PRODIGY_MOMENTS = "prodigy_moments";
        ProdigyUpdate(tensors: DevicePtr, count: i32, per_block: i32, keep: f32, lr: f32, eps: f32):
            PRODIGY_UPDATE = "prodigy_update";
        SumSquares(tensors: DevicePtr, count: i32, per_block: i32, partials: DevicePtr):
            SUM_SQUARES = "sum_squares";
        SumPartials(partials: DevicePtr, out: DevicePtr, count: i32, columns: i32):
            SUM_PARTIALS = "sum_partials";
    }
    EPILOGUE {
        EpilogueParams(sums: DevicePtr, bias: DevicePtr, gate: DevicePtr, residual: DevicePtr, out: DevicePtr, rows:
            i64, cols: i32):
            EPILOGUE_F32_F32 = "epilogue_f32_f32", EPILOGUE_F32_BF16 = "epilogue_f32_bf16",
            EPILOGUE_BF16_BF16 = "epilogue_bf16_bf16";
    }
    REDUCE {
        L1Partial(x: DevicePtr, y: DevicePtr, partials: DevicePtr, n: i64, per_block: i64):
            L1_PARTIAL_F32 = "l1_partial_f32", L1_PARTIAL_BF16 = "l1_partial_bf16";
        RelativeL1(partials: DevicePtr, out: DevicePtr, count: i32):
            RELATIVE_L1 = "relative_l1";
    }
    ROPE {
        NormRope(x: DevicePtr, weight: DevicePtr, cosines: DevicePtr, sines: DevicePtr, out: DevicePtr,
            tokens: i64, heads: i32, head_dim: i32, halves: i32, eps: f32):
            NORM_ROPE_F32 = "norm_rope_f32", NORM_ROPE_BF16 = "norm_rope_bf16";
        NormRope128(x: DevicePtr, weight: DevicePtr, out: DevicePtr, heads: i32, k: DevicePtr, k_weight:
            DevicePtr, k_out: DevicePtr, k_heads: i32, cosines: DevicePtr, sines: DevicePtr, tokens: i32,
            halves: i32, eps: f32):
            NORM_ROPE_128_F32 = "norm_rope_128_f32", NORM_ROPE_128_BF16 = "norm_rope_128_bf16";
    }
    SOFTMAX {
        SoftmaxRows(x: DevicePtr, out: DevicePtr, n: i32):
            SOFTMAX_ROWS_F32 = "softmax_rows_f32", SOFTMAX_ROWS_BF16 = "softmax_rows_bf16";
    }
    DEQUANTIZE {
        Dequantize(w: PackedMatrixArgs, out: DevicePtr):
            DEQUANTIZE_F32 = "dequantize_f32", DEQUANTIZE_BF16 = "dequantize_bf16";
    }
}
