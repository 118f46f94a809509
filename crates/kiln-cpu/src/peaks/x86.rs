//! Loops that do nothing but multiply and add.

use std::arch::asm;
use std::arch::x86_64::*;
use std::hint::black_box;

use super::{Peak, Peaks, rate};
use crate::simd::{Amx, Avx2, Avx512};

/// Rounds of a loop between two looks at the clock.
const ROUNDS: u64 = 20_000;
/// Sums that are kept at once: enough to hide how long a multiply-add takes.
const SUMS: u64 = 12;

pub(super) fn measure(threads: usize, peaks: &mut Peaks) {
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
    if Amx::detect().is_some() {
        // Four tiles of 16 × 16 sums over 32 values of bf16, or 64 of int8.
        peaks.amx_bf16 = spin("AMX bf16", 4 * 2 * 16 * 16 * 32, tiles_bf16);
        if has_int8_tiles() {
            peaks.amx_int8 = spin("AMX int8", 4 * 2 * 16 * 16 * 64, tiles_int8);
        }
    }
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

/// Whether the tiles multiply int8, too.
fn has_int8_tiles() -> bool {
    const INT8: u32 = 1 << 25;
    // SAFETY: there is a leaf 7, where AMX was found. Newer compilers know that the instruction is always safe.
    #[allow(unused_unsafe)]
    let leaf = unsafe { __cpuid_count(7, 0) };
    leaf.edx & INT8 != 0
}

macro_rules! tiles {
    ($name:ident, $instruction:literal) => {
        /// Four sums of tiles; only where [`Amx`] was found.
        fn $name(rounds: u64) {
            let Some(amx) = Amx::detect() else { return };
            let _tiles = amx.tiles();
            // SAFETY: the thread's tiles are set up while `_tiles` lives; no memory is touched.
            unsafe {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
                    "2:",
                    concat!($instruction, " tmm0, tmm4, tmm6"),
                    concat!($instruction, " tmm1, tmm4, tmm7"),
                    concat!($instruction, " tmm2, tmm5, tmm6"),
                    concat!($instruction, " tmm3, tmm5, tmm7"),
                    "dec {rounds}",
                    "jnz 2b",
                    rounds = inout(reg) rounds.max(1) => _,
                    options(nostack, nomem)
                );
            }
        }
    };
}

tiles!(tiles_bf16, "tdpbf16ps");
tiles!(tiles_int8, "tdpbssd");
