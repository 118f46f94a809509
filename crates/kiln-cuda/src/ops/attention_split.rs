//! Attention of heads of 256 and 512, each split among warps.

use kiln_ops::Result;

use crate::context::Context;
use crate::kernels::{AttentionArgs, Kernel, kernels};

kernels! {
    "attention_split" {
        AttentionSplit(args: AttentionArgs):
            ATTENTION_256 = "attention_256", ATTENTION_512 = "attention_512";
    }
}

/// Tile sizes of the kernel for one head dimension, as in `attention_split.cu`.
#[derive(Clone, Copy, Debug)]
pub(super) struct SplitKernel {
    dim: usize,
    kernel: Kernel<AttentionSplit>,
    split: usize,
    row_warps: usize,
    keys: usize,
}

const KERNELS: [SplitKernel; 2] = [
    SplitKernel { dim: 256, kernel: ATTENTION_256, split: 2, row_warps: 4, keys: 32 },
    SplitKernel { dim: 512, kernel: ATTENTION_512, split: 4, row_warps: 2, keys: 16 },
];

/// The kernel for heads of this size.
pub(super) fn find(dim: usize) -> Option<SplitKernel> {
    KERNELS.into_iter().find(|split| split.dim == dim)
}

impl SplitKernel {
    fn threads(&self) -> usize {
        32 * self.split * self.row_warps
    }

    fn queries(&self) -> usize {
        16 * self.row_warps
    }

    /// Bytes of shared memory: two stages of keys and values, and the warps' partial scores.
    fn shared(&self) -> usize {
        let stages = 2 * 2 * self.keys * (self.dim + 8) * 2;
        stages + self.split * self.row_warps * 16 * self.keys * 4
    }

    pub fn run(&self, cx: &Context, args: &AttentionArgs) -> Result<()> {
        let grid = [(args.queries as usize).div_ceil(self.queries()), args.heads as usize];
        cx.launch(self.kernel, grid, self.threads(), self.shared(), &AttentionSplit { args: *args })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_fits_the_smallest_gpu_and_its_own_queries() {
        for split in KERNELS {
            assert!(split.shared() <= 99 << 10, "{split:?} needs {}", split.shared());
            // Queries are loaded through the memory of two stages of keys and values.
            assert!(split.queries() <= 4 * split.keys, "{split:?}");
            assert_eq!(split.dim / split.split % 16, 0);
        }
    }
}
