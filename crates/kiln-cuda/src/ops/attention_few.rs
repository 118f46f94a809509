//! Attention of few queries with heads of 128: one token's to all tokens before it.

use kiln_ops::Result;
use kiln_tensor::DType;

use crate::context::{Context, int};
use crate::kernels::{AttentionArgs, kernels};
use crate::sys::driver::DevicePtr;

kernels! {
    "attention_few" {
        AttentionFew(args: AttentionArgs, partials: DevicePtr, done: DevicePtr, splits: i32):
            ATTENTION_FEW = "attention_few" by dtype;
    }
}

/// Head dimension and threads, as in `attention_few.cu`.
const DIM: i32 = 128;
const THREADS: usize = 512;
/// Floats of a block's partial result.
const PARTIAL: usize = DIM as usize + 2;
/// Least number of keys for a block.
const MIN_KEYS: usize = 64;
/// From here on tiles pay off, which read keys once for several queries.
const MAX_QUERIES: i32 = 4;

fn multiprocessors(cx: &Context) -> i32 {
    cx.gpu().multiprocessors.max(1)
}

/// Whether the kernel takes these arguments, which are aligned: queries that leave multiprocessors idle.
pub(super) fn supports(cx: &Context, args: &AttentionArgs) -> bool {
    args.head_dim == DIM
        && args.lse == 0
        && args.keys > 0
        && args.queries <= MAX_QUERIES
        && args.queries * args.heads <= multiprocessors(cx)
}

pub(super) fn run(cx: &Context, args: &AttentionArgs, dtype: DType) -> Result<()> {
    let rows = (args.queries * args.heads) as usize;
    let splits = splits(rows, args.keys as usize, multiprocessors(cx) as usize);
    let partials = cx.allocate(rows * splits * PARTIAL * size_of::<f32>())?;
    let kernel = ATTENTION_FEW.of(dtype);
    let parameters = AttentionFew {
        args: *args,
        partials: partials.ptr(cx),
        done: cx.check(cx.shared().flags.ptr(cx))?,
        splits: int("attention", splits)?,
    };
    cx.launch(kernel, [args.queries as usize * splits, args.heads as usize], THREADS, 0, &parameters)
}

/// Blocks that share the keys of a query and head, one per multiprocessor.
fn splits(rows: usize, keys: usize, multiprocessors: usize) -> usize {
    (multiprocessors / rows).min(keys.div_ceil(MIN_KEYS)).max(1)
}

#[cfg(test)]
mod tests {
    use super::splits;

    #[test]
    fn keys_are_shared_by_as_many_blocks_as_there_are_multiprocessors() {
        assert_eq!(splits(32, 700, 132), 4);
        assert_eq!(splits(32, 100, 132), 2);
        assert_eq!(splits(32, 1, 132), 1);
        assert_eq!(splits(132, 5000, 132), 1);
    }
}
