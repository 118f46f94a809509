//! Loops that do nothing but multiply and add.

use std::arch::asm;
use std::arch::x86_64::*;
use std::hint::black_box;

use super::{Peak, Peaks, rate};
use crate::simd::{Amx, Avx2, Avx512, TILE};

/// Rounds of a loop between two looks at the clock.
const ROUNDS: u64 = 20_000;
/// Sums that are kept at once: enough to hide how long a multiply-add takes.
const SUMS: u64 = 12;

pub(super) fn measure(threads: usize, mut peaks: Peaks) -> Peaks {
    let spin = |name, flops: u64, spin: fn(u64)| {
        let rate = rate(threads, |_| {
            move || {
                spin(ROUNDS);
                (ROUNDS * flops) as f64
            }
        });
        Some(Peak { name, rate })
    };
    if Avx512::detect().is_some() {
        // SAFETY: the instructions were found.
        peaks.fma_f32 = spin("AVX-512 f32", SUMS * 32, |n| unsafe { fma_512(n) });
    } else if Avx2::detect().is_some() {
        // SAFETY: the instructions were found.
        peaks.fma_f32 = spin("AVX2 f32", SUMS * 16, |n| unsafe { fma_256(n) });
    }
    if std::is_x86_feature_detected!("avx512bf16") && Avx512::detect().is_some() {
        // SAFETY: the instructions were found.
        peaks.vector_bf16 = spin("AVX-512 bf16", SUMS * 64, |n| unsafe { dot_bf16(n) });
    }
    if std::is_x86_feature_detected!("avx512vnni") && Avx512::detect().is_some() {
        // SAFETY: the instructions were found.
        peaks.vector_int8 = spin("AVX-512 int8", SUMS * 128, |n| unsafe { dot_int8(n) });
    }
    if let Some(amx) = Amx::detect() {
        // Four tiles of 16 × 16 sums over 32 values of bf16, or 64 of int8.
        peaks.amx_bf16 = spin("AMX bf16", 4 * 2 * 16 * 16 * 32, tiles_bf16);
        if amx.has_int8() {
            peaks.amx_int8 = spin("AMX int8", 4 * 2 * 16 * 16 * 64, tiles_int8);
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

/// Four tiles of numbers that look random. With zeros a chip takes less power and runs up to a quarter faster than any
/// real product could.
#[repr(align(64))]
struct Numbers([u16; 4 * TILE]);

impl Numbers {
    fn new() -> Numbers {
        let mut state = 1u32;
        Numbers(std::array::from_fn(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // As bf16 between 0.5 and 2 in size, as bytes anything.
            0x3f00 | (state >> 16) as u16 & 0x80ff
        }))
    }
}

macro_rules! tiles {
    ($name:ident, $instruction:literal) => {
        /// Four sums of tiles; only where [`Amx`] was found.
        fn $name(rounds: u64) {
            let Some(amx) = Amx::detect() else { return };
            let _tiles = amx.tiles();
            let numbers = Numbers::new();
            // SAFETY: the thread's tiles are set up while `_tiles` lives; four of them are read.
            unsafe {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "tileloadd tmm4, [{numbers} + {row}]",
                    "tileloadd tmm5, [{numbers} + {row} + 1024]",
                    "tileloadd tmm6, [{numbers} + {row} + 2048]",
                    "tileloadd tmm7, [{numbers} + {row} + 3072]",
                    "2:",
                    concat!($instruction, " tmm0, tmm4, tmm6"),
                    concat!($instruction, " tmm1, tmm4, tmm7"),
                    concat!($instruction, " tmm2, tmm5, tmm6"),
                    concat!($instruction, " tmm3, tmm5, tmm7"),
                    "dec {rounds}",
                    "jnz 2b",
                    numbers = in(reg) numbers.0.as_ptr(),
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
