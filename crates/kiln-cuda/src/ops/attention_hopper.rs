use kiln_ops::Result;

use crate::context::{Context, int};
use crate::kernels::{
    ATTENTION_HOPPER_128, Attention, AttentionHopper, HopperAttention, MAX_SEGMENTS, Segments,
};
use crate::sys::driver::TensorMap;

/// Queries and keys of a tile; the numbers are those in `attention_hopper.cu`.
const ROWS: usize = 128;
const KEYS: usize = 144;
const DIM: i32 = 128;
const THREADS: usize = 384;
/// Queries, two stages of keys and values, barriers, and what it takes to begin at a multiple of 1024.
const SHARED: usize = (ROWS + 4 * KEYS) * DIM as usize * 2 + 128 + 1024;
/// Bytes of sums that a block leaves to the next.
const LEFT: usize = 2 * 68 * 128 * 4;

/// Whether this GPU and call are the kernel's. Values have to lie in blocks of the keys' sizes.
pub(super) fn takes(cx: &Context, call: &Attention) -> bool {
    cx.gpu().capability == (9, 0)
        && call.head_dim == DIM
        && call.k.count == call.v.count
        && call.k.end == call.v.end
        && call.keys > 0
}

pub(super) fn run(cx: &Context, call: &Attention) -> Result<()> {
    let maps = |s: &Segments, heads: i32, tile: usize| -> Result<[TensorMap; MAX_SEGMENTS]> {
        let mut maps = [TensorMap::NONE; MAX_SEGMENTS];
        let width = (heads * DIM) as usize;
        for (i, (map, rows)) in maps.iter_mut().zip(s.rows()).enumerate() {
            *map = cx.done(cx.driver().map_tensor(s.start[i], [width, rows], [width], [tile]))?;
        }
        Ok(maps)
    };
    let tiles = |s: &Segments, tile: usize| s.rows().map(|rows| rows.div_ceil(tile)).sum::<usize>();
    let (query_tiles, key_tiles) = (tiles(&call.q, ROWS), tiles(&call.k, KEYS));
    let items = query_tiles * call.heads as usize;
    let blocks = items.min(cx.gpu().processors.max(1) as usize);
    let shared = shared_items(items, blocks, call.mask != 0);
    let left =
        if shared > 0 { Some((cx.block(blocks * LEFT)?, cx.done(cx.shared().flags.at(cx))?)) } else { None };
    let number = |n: usize| int("attention", n);
    let arguments = HopperAttention {
        q: maps(&call.q, call.heads, ROWS)?,
        k: maps(&call.k, call.kv_heads, KEYS)?,
        v: maps(&call.v, call.kv_heads, KEYS)?,
        query_end: call.q.end,
        key_end: call.k.end,
        query_segments: call.q.count,
        key_segments: call.k.count,
        out: call.out,
        queries: call.queries,
        keys: call.keys,
        heads: call.heads,
        kv_heads: call.kv_heads,
        mask: call.mask,
        a: call.a,
        b: call.b,
        scale: call.scale,
        query_tiles: number(query_tiles)?,
        key_tiles: number(key_tiles)?,
        shared_items: number(shared)?,
        share: number(shared * key_tiles / blocks)?,
        longer: number(shared * key_tiles % blocks)?,
        unused: 0,
        left: left.as_ref().map_or(0, |(left, _)| left.at(cx)),
        ready: left.as_ref().map_or(0, |&(_, ready)| ready),
    };
    cx.launch(ATTENTION_HOPPER_128, [blocks, 1], THREADS, SHARED, &AttentionHopper { t: arguments })
}

/// How many items, each a tile of a head's queries, blocks divide among them: all but those that every block gets a whole
/// one of, and at least as many as there are blocks. Where masks make items unequal, none.
fn shared_items(items: usize, blocks: usize, masked: bool) -> usize {
    match items.checked_rem(blocks) {
        Some(1..) if !masked => items % blocks + blocks,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::shared_items;

    #[test]
    fn what_does_not_come_out_even_is_shared() {
        assert_eq!(shared_items(864, 132, false), 204);
        assert_eq!(shared_items(133, 132, false), 133);
        assert_eq!(shared_items(264, 132, false), 0);
        assert_eq!(shared_items(5, 5, false), 0);
        assert_eq!(shared_items(864, 132, true), 0);
        assert_eq!(shared_items(0, 0, false), 0);
    }
}
