//! From an instruction set that is known at run time to code compiled for it.

use super::{Portable, Simd};
use crate::isa::Level;
#[cfg(target_arch = "aarch64")]
use crate::isa::Neon;
#[cfg(target_arch = "x86_64")]
use crate::isa::{Avx2, Avx512};

/// Defines the entry point of a kernel: `fn name<T: Element>(args…) -> R => kernel` becomes `name(level, args…)`, which
/// runs `kernel(s, args…)` compiled for the instruction set of `level`.
macro_rules! dispatch {
    ($(#[$doc:meta])* $vis:vis fn $name:ident $(<$($g:ident : $bound:path),+>)?
        ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? => $kernel:path;) => {
        $(#[$doc])*
        $vis fn $name $(<$($g: $bound),+>)? (level: $crate::isa::Level, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2 $(<$($g: $bound),+>)? (s: $crate::isa::Avx2, $($arg: $ty),*) $(-> $ret)? {
                $kernel(s, $($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                fn avx512 $(<$($g: $bound),+>)? (s: $crate::isa::Avx512, $($arg: $ty),*) $(-> $ret)? {
                $kernel(s, $($arg),*)
            }
            match level {
                $crate::isa::Level::Portable => $kernel($crate::simd::Portable, $($arg),*),
                #[cfg(target_arch = "aarch64")]
                // Part of the target's base instructions.
                $crate::isa::Level::Neon(s) => $kernel(s, $($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the token exists only if the machine has these instructions.
                $crate::isa::Level::Avx2(s) => unsafe { avx2(s, $($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::isa::Level::Avx512(s) => unsafe { avx512(s, $($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::isa::Level::Amx(amx) => unsafe { avx512(amx.avx512(), $($arg),*) },
            }
        }
    };
}
pub(crate) use dispatch;

impl Level {
    /// Rows of the register tile (MR).
    pub fn tile_rows(self) -> usize {
        match self {
            Level::Portable => Portable::TILE_ROWS,
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) => Neon::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Avx2::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) | Level::Amx(_) => Avx512::TILE_ROWS,
        }
    }

    /// Columns of the register tile (NR): the width of a panel.
    pub fn tile_cols(self) -> usize {
        match self {
            Level::Portable => Portable::TILE_COLS,
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) => Neon::TILE_COLS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Avx2::TILE_COLS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) | Level::Amx(_) => Avx512::TILE_COLS,
        }
    }
}
