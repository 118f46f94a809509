use kiln_tensor::DType;

use crate::sys::driver::DevicePtr;

/// Multiplications from which timing pays off; smaller products are launch-bound.
const WORTH_TIMING: usize = 1 << 28;

/// Sizes and strides of a product, the key of its plan. Strides are in elements, from row to row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GemmShape {
    pub rows: usize,
    pub k: usize,
    pub n: usize,
    pub ldx: usize,
    pub ldw: usize,
    pub ldadd: usize,
    pub ldo: usize,
    /// Dtype of `x` and `w`.
    pub dtype: DType,
    /// Dtype of the result and the summand.
    pub out_dtype: DType,
    pub add: bool,
    /// Number of products with the same `x`; strides between their weights and between their results.
    pub batch: usize,
    pub stride_w: usize,
    pub stride_out: usize,
    /// Whether `w` is `[k, n]` instead of `[n, k]`.
    pub w_is_k_by_n: bool,
    /// Whether `x` is `[k, rows]` instead of `[rows, k]`.
    pub x_is_k_by_rows: bool,
    /// Columns of `x` that lie in a packed matrix of their own, on the right of the others; 0 for none.
    pub right: usize,
    /// Whether columns of the result are multiplied by a gate before the summand is added.
    pub gate: bool,
    /// Whether the result is SwiGLU: `w` has `n` rows for the gates, then `n` for what they gate.
    pub swiglu: bool,
}

impl GemmShape {
    /// A product of packed matrices `[rows, k]` and `[n, k]`.
    pub fn packed([rows, n, k]: [usize; 3], dtype: DType, out_dtype: DType, add: bool) -> GemmShape {
        GemmShape {
            rows,
            k,
            n,
            ldx: k,
            ldw: k,
            ldadd: n,
            ldo: n,
            dtype,
            out_dtype,
            add,
            batch: 1,
            stride_w: 0,
            stride_out: 0,
            w_is_k_by_n: false,
            x_is_k_by_rows: false,
            right: 0,
            gate: false,
            swiglu: false,
        }
    }

    /// The product of which the second half of `w`'s rows is gated by the first, as SwiGLU.
    pub fn with_swiglu(self) -> GemmShape {
        let n = self.n / 2;
        GemmShape { n, ldadd: n, ldo: n, swiglu: true, ..self }
    }

    /// Whether Kiln's own kernels alone do all of it.
    pub fn is_fused(&self) -> bool {
        self.right > 0 || self.gate || self.swiglu
    }

    /// Whether kernels that take `step` bytes of each row at a time can fuse what it asks for: both parts of x are whole steps, and
    /// SwiGLU is all that becomes of its product.
    pub fn can_be_fused(&self, operands: &Operands, step: usize) -> bool {
        let left = (self.k - self.right) * self.dtype.size();
        (self.right == 0 || !self.x_is_k_by_rows && left.is_multiple_of(step))
            && (!self.swiglu
                || !self.w_is_k_by_n
                    && self.batch == 1
                    && self.out_dtype == DType::BF16
                    && operands.bias.is_none()
                    && !self.gate
                    && !self.add)
    }

    /// Rows of `w`.
    pub fn w_rows(&self) -> usize {
        if self.swiglu { 2 * self.n } else { self.n }
    }

    /// Whether to time candidate algorithms.
    pub fn is_worth_timing(&self) -> bool {
        self.rows.saturating_mul(self.w_rows()).saturating_mul(self.k).saturating_mul(self.batch)
            >= WORTH_TIMING
    }

    /// Bytes from the first to the last element of the result.
    pub fn out_bytes(&self) -> usize {
        ((self.batch - 1) * self.stride_out + (self.rows - 1) * self.ldo + self.n) * self.out_dtype.size()
    }
}

/// Addresses and scale factors of a product.
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    pub w: DevicePtr,
    pub x: DevicePtr,
    /// The right columns of `x`, if the shape has some.
    pub x_right: Option<DevicePtr>,
    /// Address of an f32 row that is multiplied with the product and its bias.
    pub gate: Option<DevicePtr>,
    pub add: Option<DevicePtr>,
    pub out: DevicePtr,
    pub alpha: f32,
    /// Address of an f32 row that is added; cuBLASLt takes none.
    pub bias: Option<DevicePtr>,
    /// Scales of the rows of the weight and of the activations.
    pub scales: Option<[DevicePtr; 2]>,
}

impl Operands {
    /// Those of `x · wᵀ`.
    pub fn new(x: DevicePtr, w: DevicePtr, out: DevicePtr) -> Operands {
        let (x_right, gate, add, bias, scales) = (None, None, None, None, None);
        Operands { w, x, x_right, gate, add, out, alpha: 1.0, bias, scales }
    }
}
