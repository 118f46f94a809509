//! The dot products that this machine uses, and code compiled for them.

use super::DotSimd;
use super::portable::PortableDot;
#[cfg(target_arch = "x86_64")]
use super::x86::Avx512Vnni;
use crate::isa::Level;
#[cfg(target_arch = "x86_64")]
use crate::isa::{Avx2, Avx512};
#[cfg(target_arch = "aarch64")]
use crate::isa::{Dotprod, I8mm, Neon};

/// The dot products that an instruction set uses.
#[derive(Clone, Copy)]
pub(crate) enum DotIsa {
    Portable(PortableDot),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    #[cfg(target_arch = "aarch64")]
    Dotprod(Dotprod),
    #[cfg(target_arch = "aarch64")]
    I8mm(I8mm),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512Vnni),
}

impl DotIsa {
    pub fn of(level: Level) -> DotIsa {
        match level {
            Level::Portable => DotIsa::Portable(PortableDot),
            #[cfg(target_arch = "aarch64")]
            Level::Neon(neon) => DotIsa::of_neon(neon),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(avx2) => DotIsa::Avx2(avx2),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(avx512) => DotIsa::of_avx512(avx512),
            #[cfg(target_arch = "x86_64")]
            Level::Amx(amx) => DotIsa::of_avx512(amx.avx512()),
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn of_neon(neon: Neon) -> DotIsa {
        match (neon.i8mm(), neon.dotprod()) {
            (Some(i8mm), _) => DotIsa::I8mm(i8mm),
            (None, Some(dotprod)) => DotIsa::Dotprod(dotprod),
            (None, None) => DotIsa::Neon(neon),
        }
    }

    /// The first AVX-512 machines lack VNNI; they use AVX2.
    #[cfg(target_arch = "x86_64")]
    fn of_avx512(avx512: Avx512) -> DotIsa {
        match (Avx512Vnni::detect(avx512), Avx2::detect()) {
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
            #[cfg(target_arch = "aarch64")]
            DotIsa::Neon(d) => of(d),
            #[cfg(target_arch = "aarch64")]
            DotIsa::Dotprod(d) => of(d),
            #[cfg(target_arch = "aarch64")]
            DotIsa::I8mm(d) => of(d),
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
            fn avx2 $(<$($g: $bound),+>)? (d: $crate::isa::Avx2, $($arg: $ty),*) $(-> $ret)? {
                $kernel(d, $($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn vnni $(<$($g: $bound),+>)? (
                d: $crate::gemm::int8::dot::x86::Avx512Vnni, $($arg: $ty),*
            ) $(-> $ret)? {
                $kernel(d, $($arg),*)
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,dotprod")]
            fn dotprod $(<$($g: $bound),+>)? (d: $crate::isa::Dotprod, $($arg: $ty),*) $(-> $ret)? {
                $kernel(d, $($arg),*)
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,i8mm")]
            fn i8mm $(<$($g: $bound),+>)? (d: $crate::isa::I8mm, $($arg: $ty),*) $(-> $ret)? {
                $kernel(d, $($arg),*)
            }
            match isa {
                DotIsa::Portable(d) => $kernel(d, $($arg),*),
                #[cfg(target_arch = "aarch64")]
                // Part of the target's base instructions.
                DotIsa::Neon(d) => $kernel(d, $($arg),*),
                #[cfg(target_arch = "aarch64")]
                // SAFETY: the token exists only if the machine has these instructions.
                DotIsa::Dotprod(d) => unsafe { dotprod(d, $($arg),*) },
                #[cfg(target_arch = "aarch64")]
                // SAFETY: as above.
                DotIsa::I8mm(d) => unsafe { i8mm(d, $($arg),*) },
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
