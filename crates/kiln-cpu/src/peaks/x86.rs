//! Loops that only multiply and add, to measure the peak rate of each unit.

use std::arch::asm;
use std::arch::x86_64::*;
use std::hint::black_box;

use super::rate::{Peak, Peaks, rate};
use crate::isa::{Amx, Avx2, Avx512};
use crate::parallel::Pool;
use crate::simd::TILE_BF16;

/// Iterations of a loop between two clock reads.
const ROUNDS: u64 = 20_000;
/// Independent sums: enough to hide the latency of a multiply-add.
const SUMS: u64 = 12;

pub(super) fn measure(pool: &Pool, mut peaks: Peaks) -> Peaks {
    let measure = |name, flops: u64, spin: fn(u64)| {
        let rate = rate(pool, |_| {
            move || {
                spin(ROUNDS);
                (ROUNDS * flops) as f64
            }
        });
        Some(Peak { name, rate })
    };
    if Avx512::detect().is_some() {
        // SAFETY: the instructions were just detected.
        peaks.fma_f32 = measure("AVX-512 f32", SUMS * 32, |n| unsafe { fma_512(n) });
    } else if Avx2::detect().is_some() {
        // SAFETY: the instructions were just detected.
        peaks.fma_f32 = measure("AVX2 f32", SUMS * 16, |n| unsafe { fma_256(n) });
    }
    if std::is_x86_feature_detected!("avx512bf16") && Avx512::detect().is_some() {
        // SAFETY: the instructions were just detected.
        peaks.vector_bf16 = measure("AVX-512 bf16", SUMS * 64, |n| unsafe { dot_bf16(n) });
    }
    if std::is_x86_feature_detected!("avx512vnni") && Avx512::detect().is_some() {
        // SAFETY: the instructions were just detected.
        peaks.vector_int8 = measure("AVX-512 int8", SUMS * 128, |n| unsafe { dot_int8(n) });
    }
    if let Some(amx) = Amx::detect() {
        // Four tiles of 16 × 16 sums over 32 bf16 values, or 64 of int8.
        peaks.amx_bf16 = measure("AMX bf16", 4 * 2 * 16 * 16 * 32, tiles_bf16);
        if amx.has_int8() {
            peaks.amx_int8 = measure("AMX int8", 4 * 2 * 16 * 16 * 64, tiles_int8);
        }
    }
    peaks
}

/// # Safety
/// The machine has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn sum(words: &[u64]) -> u64 {
    let mut sums = [0u64; 32];
    let (chunks, rest) = words.as_chunks::<32>();
    for chunk in chunks {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum ^= word;
        }
    }
    sums.iter().chain(rest).fold(0, |sum, word| sum ^ word)
}

macro_rules! spin {
    ($(#[$doc:meta])* $name:ident, $feature:literal, $a:expr, $zero:expr, $step:expr) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The machine has these instructions.
        #[target_feature(enable = $feature)]
        unsafe fn $name(rounds: u64) {
            let (a, b) = (black_box($a), black_box($a));
            let mut sums = [$zero; SUMS as usize];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = $step(*sum, a, b);
                }
            }
            black_box(sums);
        }
    };
}

spin!(
    /// f32, sixteen at a time.
    fma_512, "avx512f", _mm512_set1_ps(1e-3), _mm512_set1_ps(0.5), |s, a, b| _mm512_fmadd_ps(a, b, s)
);
spin!(
    /// f32, eight at a time.
    fma_256, "avx2,fma", _mm256_set1_ps(1e-3), _mm256_set1_ps(0.5), |s, a, b| _mm256_fmadd_ps(a, b, s)
);
spin!(
    /// bf16, 32 at a time.
    dot_bf16, "avx512f,avx512bf16", _mm512_cvtne2ps_pbh(_mm512_set1_ps(1e-3), _mm512_set1_ps(1e-3)),
    _mm512_set1_ps(0.5), |s, a, b| _mm512_dpbf16_ps(s, a, b)
);
spin!(
    /// int8, 64 at a time.
    dot_int8, "avx512f,avx512vnni", _mm512_set1_epi8(1), _mm512_setzero_si512(),
    |s, a, b| _mm512_dpbusd_epi32(s, a, b)
);

/// Four tiles of pseudorandom values. With zeros a processor takes less power and runs up to a quarter faster than in any
/// real product.
#[repr(align(64))]
struct RandomTiles([u16; 4 * TILE_BF16]);

impl RandomTiles {
    fn new() -> RandomTiles {
        let mut state = 1u32;
        RandomTiles(std::array::from_fn(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // As bf16 a magnitude from 0.5 to 2, as bytes anything.
            0x3f00 | (state >> 16) as u16 & 0x80ff
        }))
    }
}

macro_rules! tiles {
    ($name:ident, $instruction:literal) => {
        /// Products into four tiles of sums; does nothing without [`Amx`].
        fn $name(rounds: u64) {
            let Some(amx) = Amx::detect() else { return };
            let _tiles = amx.configure_tiles();
            let values = RandomTiles::new();
            // SAFETY: the thread's tile registers are configured while `_tiles` lives; four tiles are read.
            unsafe {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "tileloadd tmm4, [{values} + {row}]",
                    "tileloadd tmm5, [{values} + {row} + 1024]",
                    "tileloadd tmm6, [{values} + {row} + 2048]",
                    "tileloadd tmm7, [{values} + {row} + 3072]",
                    "2:",
                    concat!($instruction, " tmm0, tmm4, tmm6"),
                    concat!($instruction, " tmm1, tmm4, tmm7"),
                    concat!($instruction, " tmm2, tmm5, tmm6"),
                    concat!($instruction, " tmm3, tmm5, tmm7"),
                    "dec {rounds}",
                    "jnz 2b",
                    values = in(reg) values.0.as_ptr(),
                    row = in(reg) 64usize,
                    rounds = inout(reg) rounds.max(1) => _,
                    options(nostack, readonly)
                );
            }
        }
    };
}

tiles!(tiles_bf16, "tdpbf16ps");
tiles!(tiles_int8, "tdpbssd");
