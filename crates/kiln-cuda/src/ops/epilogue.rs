//! What follows a product that does not do it itself: bias, gate and residual.

use kiln_ops::Result;
use kiln_tensor::DType;

use super::grid::{THREADS, row_grid};
use crate::context::{Context, int};
use crate::kernels::kernels;
use crate::queue::DeviceBuffer;
use crate::sys::driver::DevicePtr;

kernels! {
    "epilogue" {
        EpilogueParams(sums: DevicePtr, bias: DevicePtr, gate: DevicePtr, residual: DevicePtr,
            out: DevicePtr, rows: i64, cols: i32):
            EPILOGUE_F32_F32 = "epilogue_f32_f32", EPILOGUE_F32_BF16 = "epilogue_f32_bf16",
            EPILOGUE_BF16_BF16 = "epilogue_bf16_bf16";
        GateScales(scales: DevicePtr, gate: DevicePtr, out: DevicePtr, rows: i32):
            GATE_SCALES = "gate_scales";
    }
}

/// Operands of `epilogue.cu`.
pub(crate) struct Epilogue {
    pub sums: DevicePtr,
    pub sums_dtype: DType,
    pub bias: Option<DevicePtr>,
    pub gate: Option<DevicePtr>,
    pub residual: Option<DevicePtr>,
    pub out: DevicePtr,
}

impl Epilogue {
    pub fn run(&self, cx: &Context, out: DType, rows: usize, cols: usize) -> Result<()> {
        let kernel = match (self.sums_dtype, out) {
            (DType::BF16, _) => EPILOGUE_BF16_BF16,
            (_, DType::BF16) => EPILOGUE_F32_BF16,
            _ => EPILOGUE_F32_F32,
        };
        let parameters = EpilogueParams {
            sums: self.sums,
            bias: self.bias.unwrap_or(0),
            gate: self.gate.unwrap_or(0),
            residual: self.residual.unwrap_or(0),
            out: self.out,
            rows: rows as i64,
            cols: int("linear", cols)?,
        };
        cx.launch(kernel, row_grid(rows, cols), THREADS, 0, &parameters)
    }
}

/// Scales of rows times the gate.
pub(super) fn gate_scales(
    cx: &Context,
    scales: DevicePtr,
    gate: DevicePtr,
    rows: usize,
) -> Result<DeviceBuffer> {
    let out = cx.allocate(4 * rows)?;
    let parameters = GateScales { scales, gate, out: out.ptr(cx), rows: int("linear", rows)? };
    cx.launch(GATE_SCALES, [rows.div_ceil(THREADS), 1], THREADS, 0, &parameters)?;
    Ok(out)
}
