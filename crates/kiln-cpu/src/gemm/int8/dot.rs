//! Integer dot products in vectors: 32-bit words that hold two or four values, and the instruction that multiplies and
//! sums them.

use crate::isa::Level;
#[cfg(target_arch = "x86_64")]
use crate::simd::Avx2;
use crate::simd::{Portable, Simd};

/// The integer dot products of one instruction set. A value of the type proves that the machine has it.
pub(crate) trait DotSimd: Copy + Send + Sync + 'static {
    /// The f32 vectors of the same instruction set.
    type S: Simd;
    /// A vector with as many words as `S` has lanes.
    type I: Copy;
    /// Values per word: four int8, or two widened to 16 bits.
    const VALUES_PER_WORD: usize;
    /// Whether the weight's values get 128 added, for an instruction that takes them unsigned. Every sum of a row is then
    /// too large by 128 times the sum of the row's activations.
    const UNSIGNED_WEIGHT: bool;
    /// Rows of the register tile; it has two vectors of columns.
    const TILE_ROWS: usize;
    const TILE_COLS: usize = 2 * Self::S::LANES;

    fn simd(self) -> Self::S;
    fn zero(self) -> Self::I;

    /// # Safety
    /// As many words as there are lanes can be read at `p`, which needs no alignment.
    unsafe fn load(self, p: *const u32) -> Self::I;

    /// The word at `p` in every lane.
    ///
    /// # Safety
    /// `p` can be read; it needs no alignment.
    unsafe fn broadcast(self, p: *const u32) -> Self::I;

    /// # Safety
    /// As many words as there are lanes can be written at `p`, which needs no alignment.
    unsafe fn store(self, p: *mut u32, v: Self::I);

    /// In each lane `sum + Σ w · x` over the values of the words, modulo 2³².
    fn dot(self, sum: Self::I, w: Self::I, x: Self::I) -> Self::I;
    fn add(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a - b`, each lane an i32, converted to f32.
    fn sub_to_f32(self, a: Self::I, b: i32) -> <Self::S as Simd>::V;

    /// Writes the low byte of each lane's bits.
    ///
    /// # Safety
    /// As many bytes as there are lanes can be written at `p`.
    unsafe fn store_bytes(self, p: *mut i8, v: <Self::S as Simd>::V);

    /// # Safety
    /// As [`microkernel`] with `TILE_ROWS`.
    unsafe fn microkernel(self, args: DotArgs);
}

/// The operands of [`DotSimd::microkernel`].
#[derive(Clone, Copy)]
pub(crate) struct DotArgs {
    /// Rows of `depth` words, `a_stride` apart.
    pub a: *const u32,
    pub a_stride: usize,
    /// `depth` rows of `TILE_COLS` words.
    pub b: *const u32,
    /// Rows of `TILE_COLS` sums, `stride` apart.
    pub c: *mut u32,
    pub stride: usize,
    pub depth: usize,
    pub add: bool,
}

/// Writes the tile `c[i][j] = Σ_k a[i][k] · b[k][j]`, added to what is there when `add`.
///
/// # Safety
/// `a`, `b` and `c` hold `ROWS` rows as [`DotArgs`] says.
#[inline(always)]
unsafe fn microkernel<D: DotSimd, const ROWS: usize>(d: D, t: DotArgs) {
    let lanes = D::S::LANES;
    let mut sums = [[d.zero(); 2]; ROWS];
    for k in 0..t.depth {
        // SAFETY: row k of b and column k of a lie inside what the caller promises.
        unsafe {
            let b = t.b.add(k * D::TILE_COLS);
            let (b0, b1) = (d.load(b), d.load(b.add(lanes)));
            for (i, sum) in sums.iter_mut().enumerate() {
                let a = d.broadcast(t.a.add(i * t.a_stride + k));
                sum[0] = d.dot(sum[0], b0, a);
                sum[1] = d.dot(sum[1], b1, a);
            }
        }
    }
    for (i, sum) in sums.iter().enumerate() {
        for (j, &sum) in sum.iter().enumerate() {
            // SAFETY: the tile's row i lies inside what the caller promises.
            unsafe {
                let c = t.c.add(i * t.stride + j * lanes);
                d.store(c, if t.add { d.add(d.load(c), sum) } else { sum });
            }
        }
    }
}

/// The dot products that an instruction set uses.
#[derive(Clone, Copy)]
pub(crate) enum DotIsa {
    Portable(PortableDot),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(x86::Avx512Vnni),
}

impl DotIsa {
    pub fn of(level: Level) -> DotIsa {
        match level {
            Level::Portable => DotIsa::Portable(PortableDot),
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) => DotIsa::Portable(PortableDot),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(avx2) => DotIsa::Avx2(avx2),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(avx512) => DotIsa::of_avx512(avx512),
            #[cfg(target_arch = "x86_64")]
            Level::Amx(amx) => DotIsa::of_avx512(amx.avx512()),
        }
    }

    /// The first AVX-512 machines lack VNNI; they use AVX2.
    #[cfg(target_arch = "x86_64")]
    fn of_avx512(avx512: crate::simd::Avx512) -> DotIsa {
        match (x86::Avx512Vnni::detect(avx512), Avx2::detect()) {
            (Some(vnni), _) => DotIsa::Avx512Vnni(vnni),
            (None, Some(avx2)) => DotIsa::Avx2(avx2),
            (None, None) => DotIsa::Portable(PortableDot),
        }
    }

    /// The layout that its operands are packed in.
    pub fn layout(self) -> DotLayout {
        fn of<D: DotSimd>(_: D) -> DotLayout {
            DotLayout {
                tile_rows: D::TILE_ROWS,
                tile_cols: D::TILE_COLS,
                values_per_word: D::VALUES_PER_WORD,
            }
        }
        match self {
            DotIsa::Portable(d) => of(d),
            #[cfg(target_arch = "x86_64")]
            DotIsa::Avx2(d) => of(d),
            #[cfg(target_arch = "x86_64")]
            DotIsa::Avx512Vnni(d) => of(d),
        }
    }
}

/// How operands are packed: the size of a register tile, and the values per word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DotLayout {
    pub tile_rows: usize,
    pub tile_cols: usize,
    pub values_per_word: usize,
}

/// As [`dispatch!`](crate::simd::dispatch), for kernels that take a [`DotSimd`].
macro_rules! dispatch_dot {
    ($(#[$doc:meta])* $vis:vis fn $name:ident $(<$($g:ident : $bound:path),+>)?
        ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? => $kernel:path;) => {
        $(#[$doc])*
        $vis fn $name $(<$($g: $bound),+>)? (isa: DotIsa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2 $(<$($g: $bound),+>)? (d: $crate::simd::Avx2, $($arg: $ty),*) $(-> $ret)? {
                $kernel(d, $($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn vnni $(<$($g: $bound),+>)? (
                d: $crate::gemm::int8::dot::x86::Avx512Vnni, $($arg: $ty),*
            ) $(-> $ret)? {
                $kernel(d, $($arg),*)
            }
            match isa {
                DotIsa::Portable(d) => $kernel(d, $($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the token exists only if the machine has these instructions.
                DotIsa::Avx2(d) => unsafe { avx2(d, $($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                DotIsa::Avx512Vnni(d) => unsafe { vnni(d, $($arg),*) },
            }
        }
    };
}
pub(crate) use dispatch_dot;

/// Plain Rust: two 16-bit values per word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortableDot;

const LANES: usize = Portable::LANES;

impl DotSimd for PortableDot {
    type S = Portable;
    type I = [u32; LANES];
    const VALUES_PER_WORD: usize = 2;
    const UNSIGNED_WEIGHT: bool = false;
    const TILE_ROWS: usize = 4;

    #[inline(always)]
    fn simd(self) -> Portable {
        Portable
    }

    #[inline(always)]
    fn zero(self) -> Self::I {
        [0; LANES]
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u32) -> Self::I {
        // SAFETY: the trait's contract; the read needs no alignment.
        unsafe { p.cast::<Self::I>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn broadcast(self, p: *const u32) -> Self::I {
        // SAFETY: as above.
        [unsafe { p.read_unaligned() }; LANES]
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut u32, v: Self::I) {
        // SAFETY: as above.
        unsafe { p.cast::<Self::I>().write_unaligned(v) }
    }

    #[inline(always)]
    fn dot(self, sum: Self::I, w: Self::I, x: Self::I) -> Self::I {
        let mut out = sum;
        for i in 0..LANES {
            let low = i32::from(w[i] as i16) * i32::from(x[i] as i16);
            let high = i32::from((w[i] >> 16) as i16) * i32::from((x[i] >> 16) as i16);
            out[i] = sum[i].wrapping_add((low + high) as u32);
        }
        out
    }

    #[inline(always)]
    fn add(self, a: Self::I, b: Self::I) -> Self::I {
        let mut out = a;
        for i in 0..LANES {
            out[i] = a[i].wrapping_add(b[i]);
        }
        out
    }

    #[inline(always)]
    fn sub_to_f32(self, a: Self::I, b: i32) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = (a[i] as i32).wrapping_sub(b) as f32;
        }
        out
    }

    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut i8, v: [f32; LANES]) {
        for (i, v) in v.into_iter().enumerate() {
            // SAFETY: the trait's contract.
            unsafe { p.add(i).write(v.to_bits() as i8) };
        }
    }

    #[inline(always)]
    unsafe fn microkernel(self, args: DotArgs) {
        // SAFETY: the trait's contract.
        unsafe { microkernel::<Self, { PortableDot::TILE_ROWS }>(self, args) }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    use std::arch::x86_64::*;

    use super::{DotArgs, DotSimd, microkernel};
    use crate::simd::{Avx2, Avx512};

    /// Two 16-bit values per word: the products of bytes would saturate.
    impl DotSimd for Avx2 {
        type S = Avx2;
        type I = __m256i;
        const VALUES_PER_WORD: usize = 2;
        const UNSIGNED_WEIGHT: bool = false;
        const TILE_ROWS: usize = 6;

        #[inline(always)]
        fn simd(self) -> Avx2 {
            self
        }

        #[inline(always)]
        fn zero(self) -> __m256i {
            // SAFETY: the token proves the instructions.
            unsafe { _mm256_setzero_si256() }
        }

        #[inline(always)]
        unsafe fn load(self, p: *const u32) -> __m256i {
            // SAFETY: the token proves the instructions; the pointers are as the trait requires.
            unsafe { _mm256_loadu_si256(p.cast()) }
        }

        #[inline(always)]
        unsafe fn broadcast(self, p: *const u32) -> __m256i {
            // SAFETY: the token proves the instructions; the pointers are as the trait requires.
            unsafe { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut u32, v: __m256i) {
            // SAFETY: the token proves the instructions; the pointers are as the trait requires.
            unsafe { _mm256_storeu_si256(p.cast(), v) }
        }

        #[inline(always)]
        fn dot(self, sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
            // SAFETY: the token proves the instructions.
            unsafe { _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)) }
        }

        #[inline(always)]
        fn add(self, a: __m256i, b: __m256i) -> __m256i {
            // SAFETY: the token proves the instructions.
            unsafe { _mm256_add_epi32(a, b) }
        }

        #[inline(always)]
        fn sub_to_f32(self, a: __m256i, b: i32) -> __m256 {
            // SAFETY: the token proves the instructions.
            unsafe { _mm256_cvtepi32_ps(_mm256_sub_epi32(a, _mm256_set1_epi32(b))) }
        }

        #[inline(always)]
        unsafe fn store_bytes(self, p: *mut i8, v: __m256) {
            // SAFETY: the token proves the instructions; the pointers are as the trait requires.
            unsafe {
                // The low bytes of each 128-bit half to its first word, then both words side by side.
                let first = _mm256_set1_epi32(0x0c08_0400);
                let halves = _mm256_shuffle_epi8(_mm256_castps_si256(v), first);
                let both = _mm256_permutevar8x32_epi32(halves, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
                _mm_storel_epi64(p.cast(), _mm256_castsi256_si128(both));
            }
        }

        #[inline(always)]
        unsafe fn microkernel(self, args: DotArgs) {
            // SAFETY: the trait's contract.
            unsafe { microkernel::<Self, 6>(self, args) }
        }
    }

    /// Proof of AVX-512 with VNNI, the dot product of bytes.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct Avx512Vnni(Avx512);

    impl Avx512Vnni {
        pub fn detect(avx512: Avx512) -> Option<Avx512Vnni> {
            is_x86_feature_detected!("avx512vnni").then_some(Avx512Vnni(avx512))
        }
    }

    impl DotSimd for Avx512Vnni {
        type S = Avx512;
        type I = __m512i;
        const VALUES_PER_WORD: usize = 4;
        const UNSIGNED_WEIGHT: bool = true;
        // 28 sums, two vectors of weights and one of an activation fill 31 of the 32 registers.
        const TILE_ROWS: usize = 14;

        #[inline(always)]
        fn simd(self) -> Avx512 {
            self.0
        }

        #[inline(always)]
        fn zero(self) -> __m512i {
            // SAFETY: the token proves the instructions.
            unsafe { _mm512_setzero_si512() }
        }

        #[inline(always)]
        unsafe fn load(self, p: *const u32) -> __m512i {
            // SAFETY: the token proves the instructions; the pointers are as the trait requires.
            unsafe { _mm512_loadu_si512(p.cast()) }
        }

        #[inline(always)]
        unsafe fn broadcast(self, p: *const u32) -> __m512i {
            // SAFETY: the token proves the instructions; the pointers are as the trait requires.
            unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut u32, v: __m512i) {
            // SAFETY: the token proves the instructions; the pointers are as the trait requires.
            unsafe { _mm512_storeu_si512(p.cast(), v) }
        }

        #[inline(always)]
        fn dot(self, sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
            // SAFETY: the token proves the instructions.
            unsafe { _mm512_dpbusd_epi32(sum, w, x) }
        }

        #[inline(always)]
        fn add(self, a: __m512i, b: __m512i) -> __m512i {
            // SAFETY: the token proves the instructions.
            unsafe { _mm512_add_epi32(a, b) }
        }

        #[inline(always)]
        fn sub_to_f32(self, a: __m512i, b: i32) -> __m512 {
            // SAFETY: the token proves the instructions.
            unsafe { _mm512_cvtepi32_ps(_mm512_sub_epi32(a, _mm512_set1_epi32(b))) }
        }

        #[inline(always)]
        unsafe fn store_bytes(self, p: *mut i8, v: __m512) {
            // SAFETY: the token proves the instructions; the pointers are as the trait requires.
            unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(v))) }
        }

        #[inline(always)]
        unsafe fn microkernel(self, args: DotArgs) {
            // SAFETY: the trait's contract.
            unsafe { microkernel::<Self, 14>(self, args) }
        }
    }
}
