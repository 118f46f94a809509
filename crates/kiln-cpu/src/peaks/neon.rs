//! Loops that only multiply and add in the vectors of 64-bit ARM, to measure the peak rate of each instruction.

use std::arch::asm;
use std::hint::black_box;

use super::rate::{Peak, Peaks, rate};
use crate::isa::{Isa, Level};
use crate::parallel::Pool;

/// Iterations of a loop between two clock reads.
const ROUNDS: u64 = 20_000;
/// Independent sums: enough to hide the latency of a multiply-add.
const SUMS: u64 = 16;

pub(super) fn measure(pool: &Pool, mut peaks: Peaks) -> Peaks {
    let measure = |name, flops: u64, spin: fn(u64)| {
        let rate = rate(pool, |_| {
            move || {
                spin(black_box(ROUNDS));
                (ROUNDS * SUMS * flops) as f64
            }
        });
        Some(Peak { name, rate })
    };
    let has = |isa| Level::detect(isa).is_some();
    // SAFETY: NEON is part of the target's base instructions.
    peaks.fma_f32 = measure("NEON f32", 8, |n| unsafe { fma_f32(n) });
    if has(Isa::NeonI8mm) {
        // SAFETY: the instructions were just detected.
        peaks.vector_int8 = measure("NEON int8, i8mm", 64, |n| unsafe { matrix_int8(n) });
    } else if has(Isa::NeonDotprod) {
        // SAFETY: the instructions were just detected.
        peaks.vector_int8 = measure("NEON int8, dotprod", 32, |n| unsafe { dot_int8(n) });
    }
    if has(Isa::NeonBf16) {
        // SAFETY: the instructions were just detected.
        peaks.vector_bf16 = measure("NEON bf16", 32, |n| unsafe { matrix_bf16(n) });
    }
    peaks
}

macro_rules! spin {
    ($name:ident, $feature:literal, $instruction:literal, $elements:literal) => {
        /// Zeros into [`SUMS`] registers.
        ///
        /// # Safety
        /// The machine has these instructions.
        #[target_feature(enable = $feature)]
        unsafe fn $name(rounds: u64) {
            // SAFETY: only registers are used, which are all named.
            unsafe {
                asm!(
                    "movi v0.2d, #0",
                    "movi v1.2d, #0",
                    "2:",
                    spin!($instruction, $elements, 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31),
                    "subs {rounds}, {rounds}, #1",
                    "b.ne 2b",
                    rounds = inout(reg) rounds.max(1) => _,
                    out("v0") _, out("v1") _,
                    out("v16") _, out("v17") _, out("v18") _, out("v19") _,
                    out("v20") _, out("v21") _, out("v22") _, out("v23") _,
                    out("v24") _, out("v25") _, out("v26") _, out("v27") _,
                    out("v28") _, out("v29") _, out("v30") _, out("v31") _,
                    options(nomem, nostack)
                );
            }
        }
    };
    ($instruction:literal, $elements:literal, $($sum:literal)+) => {
        concat!($($instruction, " v", $sum, ".4s, v0.", $elements, ", v1.", $elements, "\n"),+)
    };
}

spin!(fma_f32, "neon", "fmla", "4s");
spin!(dot_int8, "neon,dotprod", "sdot", "16b");
spin!(matrix_int8, "neon,i8mm", "smmla", "16b");
spin!(matrix_bf16, "neon,bf16", "bfmmla", "8h");
