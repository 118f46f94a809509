//! AMX on bytes: a tile is 16 rows of 64, and one instruction sums products of four pairs into 32 bits.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::LazyLock;

use super::{Amx, Tiles};

/// Elements of a tile of bytes: 16 rows of 64.
pub(crate) const BYTE_TILE: usize = 1024;

impl Amx {
    /// Whether the tiles multiply bytes, too.
    pub fn has_int8(self) -> bool {
        const INT8: u32 = 1 << 25;
        static FOUND: LazyLock<bool> = LazyLock::new(|| {
            // SAFETY: there is a leaf 7, where AMX was found. Newer compilers know that the instruction is always safe.
            #[allow(unused_unsafe)]
            let leaf = unsafe { __cpuid_count(7, 0) };
            leaf.edx & INT8 != 0
        });
        *FOUND
    }
}

/// The operands of [`Tiles::multiply_bytes`].
#[derive(Clone, Copy)]
pub(crate) struct BytePair {
    /// For every step two tiles, one below the other: rows of 64 values of the sum.
    pub a: *const i8,
    /// For every step two tiles, side by side: 16 rows, each of four values of the sum for 16 columns.
    pub b: *const i8,
    /// Four tiles of sums: top left, top right, bottom left, bottom right.
    pub c: *mut i32,
    /// At least 1.
    pub steps: usize,
    /// Two rows that are soon to be read, fetched meanwhile; anywhere.
    pub next: [*const u8; 2],
    pub add: bool,
}

impl Tiles {
    /// Writes the 32 × 32 sums of `a · b`, added to what is there when `add`.
    ///
    /// # Safety
    /// The machine has AMX with int8; `a` and `b` hold `2 · steps` tiles of [`BYTE_TILE`] values, `c` four tiles of 256.
    #[inline(always)]
    pub unsafe fn multiply_bytes(&mut self, p: BytePair) {
        // SAFETY: the configuration is in place as long as `self` lives; the memory is as the caller promises. Fetching
        // ahead never faults.
        unsafe {
            asm!(
                "test {add}, {add}",
                "jnz 2f",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 3f",
                "2:",
                "tileloadd tmm0, [{c} + {row}]",
                "tileloadd tmm1, [{c} + {row} + 1024]",
                "tileloadd tmm2, [{c} + {row} + 2048]",
                "tileloadd tmm3, [{c} + {row} + 3072]",
                "3:",
                // Each is read once a pass: the hint keeps them from driving the left tiles out of the first-level cache.
                "tileloaddt1 tmm6, [{b} + {row}]",
                "tileloadd tmm4, [{a} + {row}]",
                "tdpbssd tmm0, tmm4, tmm6",
                "tileloaddt1 tmm7, [{b} + {row} + 1024]",
                "tdpbssd tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a} + {row} + 1024]",
                "tdpbssd tmm2, tmm5, tmm6",
                "tdpbssd tmm3, tmm5, tmm7",
                "prefetcht1 [{next0}]",
                "prefetcht1 [{next1}]",
                "add {next0}, 64",
                "add {next1}, 64",
                "add {a}, 2048",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{c} + {row}], tmm0",
                "tilestored [{c} + {row} + 1024], tmm1",
                "tilestored [{c} + {row} + 2048], tmm2",
                "tilestored [{c} + {row} + 3072], tmm3",
                a = inout(reg) p.a => _,
                b = inout(reg) p.b => _,
                c = in(reg) p.c,
                steps = inout(reg) p.steps => _,
                next0 = inout(reg) p.next[0] => _,
                next1 = inout(reg) p.next[1] => _,
                add = in(reg) usize::from(p.add),
                row = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
    }
}
