//! AMX: eight tile registers of 16 rows × 64 bytes, and an instruction that multiplies two of them.
//!
//! The instructions are inline assembly because the intrinsics are not stable. The compiler never uses tile registers
//! itself; a [`TileRegisters`] holds the thread's tile configuration while it lives.

use std::arch::asm;
use std::marker::PhantomData;

use crate::isa::Amx;

/// Bytes of a tile: 16 rows of 64.
pub(crate) const TILE_BYTES: usize = 1024;
/// Elements of a bf16 tile: 16 rows of 32.
pub(crate) const TILE_BF16: usize = TILE_BYTES / 2;

impl Amx {
    /// Configures this thread's tile registers, all as 16 rows of 64 bytes.
    pub fn configure_tiles(self) -> TileRegisters {
        #[repr(C, align(64))]
        struct Config {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        let mut config =
            Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: the token proves the instructions; the 64 bytes describe eight full tiles.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly, preserves_flags)) };
        TileRegisters(PhantomData)
    }
}

/// This thread's configured tile registers; released on drop.
pub(crate) struct TileRegisters(PhantomData<*mut ()>);

/// The left operand of a product of tiles: 32 rows of 64 bytes per step.
#[derive(Clone, Copy)]
pub(crate) enum LeftOperand {
    /// Two packed tiles per step, one below the other.
    Tiles(*const u8),
    /// Rows `stride` bytes apart; the product also copies them to `tiles`, packed as [`LeftOperand::Tiles`].
    Rows { first: *const u8, stride: usize, tiles: *mut u8 },
}

/// The operands of [`TileRegisters::multiply`].
#[derive(Clone, Copy)]
pub(crate) struct TileOperands {
    pub a: LeftOperand,
    /// Two packed tiles per step, side by side: 16 rows, each with 4 bytes of 16 columns.
    pub b: *const u8,
    /// Four tiles of sums: top left, top right, bottom left, bottom right.
    pub c: *mut u8,
    pub steps: usize,
    pub add: bool,
}

/// The number format of a product of tiles.
pub(crate) trait TileDtype {
    /// Whether it is int8 with 32-bit sums, rather than bf16 with f32 sums.
    const INT8: bool;
}

/// bf16 with f32 sums.
pub(crate) struct Bf16Tiles;
/// int8 with 32-bit sums.
pub(crate) struct Int8Tiles;

impl TileDtype for Bf16Tiles {
    const INT8: bool = false;
}

impl TileDtype for Int8Tiles {
    const INT8: bool = true;
}

/// The four bf16 products of a step: left tiles in 4 and 5, right ones in 6 and 7. Each load stands just before its first
/// use, so that products begin before all four tiles are there.
macro_rules! step_bf16 {
    ($p:expr, [$($store:literal),*], {$($operand:tt)*}) => {{
        let (a, below, stride, b): (*const u8, *const u8, usize, *const u8) = $p;
        asm!(
            "tileloaddt1 tmm6, [{b} + {line}]",
            "tileloadd tmm4, [{a} + {stride}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloaddt1 tmm7, [{b} + {line} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{below} + {stride}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            $($store,)*
            a = in(reg) a,
            below = in(reg) below,
            stride = in(reg) stride,
            b = in(reg) b,
            line = in(reg) 64usize,
            $($operand)*
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags)
        );
    }};
}

/// [`step_bf16!`] for int8, where the left operand changes from product to product and so is loaded first.
///
/// # Safety
/// The machine multiplies int8 in tiles; both operands hold two tiles.
#[inline(always)]
unsafe fn step_int8(a: *const u8, b: *const u8) {
    // SAFETY: upheld by the caller.
    unsafe {
        asm!(
            "tileloaddt1 tmm4, [{a} + {line}]",
            "tileloadd tmm6, [{b} + {line}]",
            "tdpbssd tmm0, tmm4, tmm6",
            "tileloaddt1 tmm5, [{a} + {line} + 1024]",
            "tdpbssd tmm2, tmm5, tmm6",
            "tileloadd tmm7, [{b} + {line} + 1024]",
            "tdpbssd tmm1, tmm4, tmm7",
            "tdpbssd tmm3, tmm5, tmm7",
            a = in(reg) a,
            b = in(reg) b,
            line = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly, preserves_flags)
        );
    }
}

impl TileRegisters {
    /// Writes the 32 × 32 sums of `a · b`, added to what is there when `add`. Calls `overlapped` with the index of every
    /// step: products take long enough to overlap other work with them.
    ///
    /// One operand is the same for many consecutive products and stays in the L1 cache: the left one of bf16, the
    /// right one of int8. The other is loaded with a hint that keeps it from evicting that one.
    ///
    /// # Safety
    /// The machine multiplies this format; `b` holds `2 · steps` tiles of [`TILE_BYTES`], as `a`'s tiles do, or each of its
    /// 32 rows holds `64 · steps` bytes; `c` holds four tiles. `overlapped` doesn't use tile registers.
    #[inline(always)]
    pub unsafe fn multiply<D: TileDtype>(&mut self, p: TileOperands, mut overlapped: impl FnMut(usize)) {
        // SAFETY: the configuration is in place while `self` lives; the memory is as the caller promises. The compiler
        // doesn't use tile registers itself, so they keep their sums from one block of assembly to the next.
        unsafe {
            self.load_sums(p.c, p.add);
            match p.a {
                LeftOperand::Tiles(tiles) => {
                    for step in 0..p.steps {
                        let at = step * 2 * TILE_BYTES;
                        let a = tiles.add(at);
                        let operands = (a, a.add(TILE_BYTES), 64, p.b.add(at));
                        if D::INT8 {
                            step_int8(a, p.b.add(at));
                        } else {
                            step_bf16!(operands, [], {});
                        }
                        overlapped(step);
                    }
                }
                LeftOperand::Rows { first, stride, tiles } => {
                    assert!(!D::INT8, "int8 operands are always packed");
                    for step in 0..p.steps {
                        let at = step * 2 * TILE_BYTES;
                        let a = first.add(step * 64);
                        let (operands, to) = ((a, a.add(16 * stride), stride, p.b.add(at)), tiles.add(at));
                        step_bf16!(
                            operands,
                            ["tilestored [{to} + {line}], tmm4", "tilestored [{to} + {line} + 1024], tmm5"],
                            { to = in(reg) to, }
                        );
                        overlapped(step);
                    }
                }
            }
            self.store_sums(p.c);
        }
    }

    /// Loads the sums to add to, or zeros.
    #[inline(always)]
    unsafe fn load_sums(&mut self, c: *mut u8, add: bool) {
        // SAFETY: as in `multiply`.
        unsafe {
            if add {
                asm!(
                    "tileloaddt1 tmm0, [{c} + {line}]",
                    "tileloaddt1 tmm1, [{c} + {line} + 1024]",
                    "tileloaddt1 tmm2, [{c} + {line} + 2048]",
                    "tileloaddt1 tmm3, [{c} + {line} + 3072]",
                    c = in(reg) c,
                    line = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    options(nostack, readonly, preserves_flags)
                );
            } else {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    options(nostack, nomem, preserves_flags)
                );
            }
        }
    }

    /// Stores the sums.
    #[inline(always)]
    unsafe fn store_sums(&mut self, c: *mut u8) {
        // SAFETY: as in `multiply`.
        unsafe {
            asm!(
                "tilestored [{c} + {line}], tmm0",
                "tilestored [{c} + {line} + 1024], tmm1",
                "tilestored [{c} + {line} + 2048], tmm2",
                "tilestored [{c} + {line} + 3072], tmm3",
                c = in(reg) c,
                line = in(reg) 64usize,
                options(nostack, preserves_flags)
            );
        }
    }
}

impl Drop for TileRegisters {
    fn drop(&mut self) {
        // SAFETY: returns the registers to their initial state, so that context switches need not save them.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
