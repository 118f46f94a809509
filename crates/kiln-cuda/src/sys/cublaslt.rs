//! cuBLASLt.

use std::ffi::{c_int, c_void};

use super::functions;
use crate::error::{Error, Result};

pub(crate) type Handle = *mut c_void;
pub(crate) type Layout = *mut c_void;
pub(crate) type Descriptor = *mut c_void;
pub(crate) type Preference = *mut c_void;
type Status = c_int;

/// An opaque algorithm; its bytes are stable for one version of the library.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Algorithm(pub [u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeuristicResult {
    pub algorithm: Algorithm,
    pub workspace: usize,
    pub state: c_int,
    pub waves: f32,
    reserved: [c_int; 4],
}

functions! {
    /// Matrix products.
    CublasLt {
        fn version = "cublasLtGetVersion"() -> usize;
        fn create = "cublasLtCreate"(*mut Handle) -> Status;
        fn destroy = "cublasLtDestroy"(Handle) -> Status;
        fn layout_create = "cublasLtMatrixLayoutCreate"(*mut Layout, c_int, u64, u64, i64) -> Status;
        fn layout_destroy = "cublasLtMatrixLayoutDestroy"(Layout) -> Status;
        fn layout_set = "cublasLtMatrixLayoutSetAttribute"(Layout, c_int, *const c_void, usize) -> Status;
        fn descriptor_create = "cublasLtMatmulDescCreate"(*mut Descriptor, c_int, c_int) -> Status;
        fn descriptor_destroy = "cublasLtMatmulDescDestroy"(Descriptor) -> Status;
        fn descriptor_set = "cublasLtMatmulDescSetAttribute"(Descriptor, c_int, *const c_void, usize) -> Status;
        fn preference_create = "cublasLtMatmulPreferenceCreate"(*mut Preference) -> Status;
        fn preference_destroy = "cublasLtMatmulPreferenceDestroy"(Preference) -> Status;
        fn preference_set = "cublasLtMatmulPreferenceSetAttribute"(Preference, c_int, *const c_void, usize) -> Status;
        fn heuristic = "cublasLtMatmulAlgoGetHeuristic"(
            Handle, Descriptor, Layout, Layout, Layout, Layout, Preference, c_int, *mut HeuristicResult, *mut c_int
        ) -> Status;
        fn algorithm_check = "cublasLtMatmulAlgoCheck"(
            Handle, Descriptor, Layout, Layout, Layout, Layout, *const Algorithm, *mut HeuristicResult
        ) -> Status;
        fn matmul = "cublasLtMatmul"(
            Handle, Descriptor, *const c_void, *const c_void, Layout, *const c_void, Layout, *const c_void,
            *const c_void, Layout, *mut c_void, Layout, *const Algorithm, *mut c_void, usize, *mut c_void
        ) -> Status;
    }
}

/// `CUBLAS_COMPUTE_32F`: f32 accumulation, without TF32 for f32 inputs.
pub(crate) const COMPUTE_32F: c_int = 68;
/// `CUDA_R_32F`.
pub(crate) const R_32F: c_int = 0;
/// `CUDA_R_16BF`.
pub(crate) const R_16BF: c_int = 14;
/// `CUDA_R_8F_E4M3`.
pub(crate) const R_8F_E4M3: c_int = 28;
/// `CUBLASLT_MATMUL_DESC_A_SCALE_POINTER`.
pub(crate) const DESC_A_SCALE: c_int = 17;
/// `CUBLASLT_MATMUL_DESC_B_SCALE_POINTER`.
pub(crate) const DESC_B_SCALE: c_int = 18;
/// `CUBLASLT_MATMUL_DESC_FAST_ACCUM`.
pub(crate) const DESC_FAST_ACCUM: c_int = 25;
/// `CUBLASLT_MATMUL_DESC_A_SCALE_MODE`.
pub(crate) const DESC_A_SCALE_MODE: c_int = 31;
/// `CUBLASLT_MATMUL_DESC_B_SCALE_MODE`.
pub(crate) const DESC_B_SCALE_MODE: c_int = 32;
/// `CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F`.
pub(crate) const SCALE_OUTER_VEC: c_int = 3;
/// `CUBLASLT_MATMUL_DESC_TRANSA`.
pub(crate) const DESC_TRANSA: c_int = 3;
/// `CUBLASLT_MATMUL_DESC_TRANSB`.
pub(crate) const DESC_TRANSB: c_int = 4;
/// `CUBLAS_OP_N`.
pub(crate) const OP_N: c_int = 0;
/// `CUBLAS_OP_T`.
pub(crate) const OP_T: c_int = 1;
/// `CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT`.
pub(crate) const LAYOUT_BATCH_COUNT: c_int = 5;
/// `CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET`.
pub(crate) const LAYOUT_BATCH_STRIDE: c_int = 6;
/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`.
pub(crate) const PREF_WORKSPACE: c_int = 1;
/// `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES`; B, C and D follow.
pub(crate) const PREF_ALIGNMENT_A: c_int = 5;

impl CublasLt {
    /// Converts a status into an error that names the call.
    pub fn check(&self, call: &'static str, status: Status) -> Result<()> {
        let name = match status {
            0 => return Ok(()),
            1 => "not initialised",
            3 => "out of memory on the host",
            7 => "invalid value",
            8 => "not supported by this GPU",
            11 => "mapping error",
            13 => "execution failed",
            14 => "internal error",
            15 => "not supported",
            _ => "failed",
        };
        Err(Error::Call { call, what: format!("{name} (status {status})") })
    }
}
