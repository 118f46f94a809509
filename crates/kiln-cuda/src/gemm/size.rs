use kiln_tensor::DType;

/// Multiplications from which on timing pays: below, the launch is what takes the time.
const WORTH_TIMING: usize = 1 << 28;

/// Sizes and strides of a product: what a plan is made for. Strides are in elements, from row to row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Size {
    pub rows: usize,
    pub k: usize,
    pub n: usize,
    pub ldx: usize,
    pub ldw: usize,
    pub ldadd: usize,
    pub ldo: usize,
    /// Of the factors.
    pub dtype: DType,
    /// Of the result and of what is added.
    pub out: DType,
    pub add: bool,
    /// Products of the same x with weights, and into results, that many elements apart.
    pub batch: usize,
    pub stride_w: usize,
    pub stride_out: usize,
    /// Whether a row of w is one place of the sum, not one output.
    pub columns: bool,
}

impl Size {
    /// Whether ways to compute it are timed.
    pub fn worth_timing(&self) -> bool {
        self.rows.saturating_mul(self.n).saturating_mul(self.k).saturating_mul(self.batch) >= WORTH_TIMING
    }

    /// Bytes from the first to the last element of the result.
    pub fn out_bytes(&self) -> usize {
        ((self.batch - 1) * self.stride_out + (self.rows - 1) * self.ldo + self.n) * self.out.size()
    }
}
