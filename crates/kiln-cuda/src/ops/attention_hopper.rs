//! Attention on Hopper for heads of 128, with TMA and wgmma.

use kiln_ops::Result;

use crate::context::{Context, int};
use crate::kernels::{AttentionArgs, HopperAttentionArgs, MAX_SEGMENTS, Segments, kernels};
use crate::queue::DeviceBuffer;
use crate::sys::driver::{DevicePtr, TensorMap};
use crate::tensor_map::MapElement;

kernels! {
    "attention_hopper" {
        AttentionHopper(args: HopperAttentionArgs):
            ATTENTION_HOPPER_128 = "attention_hopper_128";
    }
}

/// Tile sizes, head dimension and threads, as in `attention_hopper.cu`.
const QUERIES: usize = 128;
const KEYS: usize = 144;
pub(super) const DIM: i32 = 128;
const THREADS: usize = 384;
/// Bytes of shared memory: queries, two stages of keys and values, barriers, and alignment to 1024.
const SHARED: usize = (QUERIES + 4 * KEYS) * DIM as usize * 2 + 128 + 1024;
/// Warpgroups of a block that multiply.
const CONSUMERS: usize = 2;
/// Bytes of partial results that a warpgroup hands to the next block's.
const PARTIAL_BYTES: usize = 68 * 128 * 4;

/// Whether the kernel takes these arguments on this GPU. Keys and values need the same segments.
pub(super) fn supports(cx: &Context, args: &AttentionArgs) -> bool {
    cx.gpu().capability == (9, 0)
        && args.head_dim == DIM
        && args.k.count == args.v.count
        && args.k.end == args.v.end
        && args.keys > 0
}

pub(super) fn run(cx: &Context, args: &AttentionArgs) -> Result<()> {
    let maps = |s: &Segments, heads: i32, tile: usize| -> Result<[TensorMap; MAX_SEGMENTS]> {
        let mut maps = [TensorMap::NONE; MAX_SEGMENTS];
        let width = (heads * DIM) as usize;
        for (i, (map, rows)) in maps.iter_mut().zip(s.rows()).enumerate() {
            let sizes = [width, rows];
            *map = cx.check(cx.driver().encode_tensor_map(
                MapElement::Bf16,
                s.start[i],
                sizes,
                [width],
                [tile],
            ))?;
        }
        Ok(maps)
    };
    let tiles = |s: &Segments, tile: usize| s.rows().map(|rows| rows.div_ceil(tile)).sum::<usize>();
    let shares = Shares::new(cx, args, [tiles(&args.q, QUERIES), tiles(&args.k, KEYS)], CONSUMERS)?;
    let parameters = HopperAttentionArgs {
        q: maps(&args.q, args.heads, QUERIES)?,
        k: maps(&args.k, args.kv_heads, KEYS)?,
        v: maps(&args.v, args.kv_heads, KEYS)?,
        ..shares.arguments(cx, args)?
    };
    cx.launch(
        ATTENTION_HOPPER_128,
        [shares.blocks, 1],
        THREADS,
        SHARED,
        &AttentionHopper { args: parameters },
    )
}

/// How the work is shared among the blocks, and the memory in which they hand over partial results.
pub(super) struct Shares {
    pub blocks: usize,
    /// Tiles of one head's queries, and of its keys.
    tiles: [usize; 2],
    split_items: usize,
    /// Partial results and flags.
    partials: Option<(DeviceBuffer, DevicePtr)>,
}

impl Shares {
    pub fn new(cx: &Context, args: &AttentionArgs, tiles: [usize; 2], consumers: usize) -> Result<Shares> {
        let items = tiles[0] * args.heads as usize;
        let blocks = items.min(cx.gpu().multiprocessors.max(1) as usize);
        let split_items = split_items(items, blocks, args.mask != 0);
        let partials = if split_items > 0 {
            let bytes = blocks * consumers * PARTIAL_BYTES;
            Some((cx.allocate(bytes)?, cx.check(cx.shared().flags.ptr(cx))?))
        } else {
            None
        };
        Ok(Shares { blocks, tiles, split_items, partials })
    }

    /// The kernel's arguments without tensor maps and scales.
    pub fn arguments(&self, cx: &Context, args: &AttentionArgs) -> Result<HopperAttentionArgs> {
        let number = |n: usize| int("attention", n);
        let key_tiles = self.split_items * self.tiles[1];
        Ok(HopperAttentionArgs {
            q: [TensorMap::NONE; MAX_SEGMENTS],
            k: [TensorMap::NONE; MAX_SEGMENTS],
            v: [TensorMap::NONE; MAX_SEGMENTS],
            query_end: args.q.end,
            key_end: args.k.end,
            query_segments: args.q.count,
            key_segments: args.k.count,
            out: args.out,
            queries: args.queries,
            keys: args.keys,
            heads: args.heads,
            kv_heads: args.kv_heads,
            mask: args.mask,
            a: args.a,
            b: args.b,
            scale: args.scale,
            query_tiles: number(self.tiles[0])?,
            key_tiles: number(self.tiles[1])?,
            split_items: number(self.split_items)?,
            tiles_per_block: number(key_tiles / self.blocks)?,
            longer_blocks: number(key_tiles % self.blocks)?,
            unused: 0,
            partials: self.partials.as_ref().map_or(0, |(partials, _)| partials.ptr(cx)),
            ready: self.partials.as_ref().map_or(0, |&(_, ready)| ready),
            lse: args.lse,
            q_scales: 0,
            k_scales: 0,
            v_scales: 0,
        })
    }
}

/// Number of work items (a tile of one head's queries) that are split among blocks along the keys: the remainder that
/// does not divide evenly plus one item per block. With masks items are unequal, and none is split.
fn split_items(items: usize, blocks: usize, masked: bool) -> usize {
    match items.checked_rem(blocks) {
        Some(1..) if !masked => items % blocks + blocks,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::split_items;

    #[test]
    fn an_uneven_remainder_is_split() {
        assert_eq!(split_items(864, 132, false), 204);
        assert_eq!(split_items(133, 132, false), 133);
        assert_eq!(split_items(264, 132, false), 0);
        assert_eq!(split_items(5, 5, false), 0);
        assert_eq!(split_items(864, 132, true), 0);
        assert_eq!(split_items(0, 0, false), 0);
    }
}
