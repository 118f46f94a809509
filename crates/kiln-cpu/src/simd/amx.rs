//! AMX: eight tile registers of 16 rows × 64 bytes, and an instruction that multiplies two of them.
//!
//! The instructions are written as assembly because the compiler's own names for them are not stable. The compiler
//! never uses tile registers itself; a [`Tiles`] holds the thread's configuration while it lives.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::LazyLock;

use super::Avx512;

/// Bytes of a tile: 16 rows of 64.
pub(crate) const TILE_BYTES: usize = 1024;
/// Elements of a bf16 tile: 16 rows of 32.
pub(crate) const TILE: usize = TILE_BYTES / 2;

/// Proof of AVX-512 with bf16 and of AMX with bf16, which the system lets this process use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx {
    vectors: Avx512,
}

impl Amx {
    pub fn detect() -> Option<Amx> {
        static ALLOWED: LazyLock<bool> = LazyLock::new(|| on_chip() && ask());
        let vectors = Avx512::detect()?;
        ALLOWED.then_some(Amx { vectors })
    }

    pub fn vectors(self) -> Avx512 {
        self.vectors
    }

    /// Whether the tiles multiply bytes, too.
    pub fn has_int8(self) -> bool {
        const INT8: u32 = 1 << 25;
        static FOUND: LazyLock<bool> = LazyLock::new(|| features() & INT8 != 0);
        *FOUND
    }

    /// Prepares this thread's tile registers.
    pub fn tiles(self) -> Tiles {
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
        Tiles(PhantomData)
    }
}

/// Whether the processor has tiles and multiplies bf16 in them.
fn on_chip() -> bool {
    const BF16: u32 = 1 << 22;
    const TILES: u32 = 1 << 24;
    // Every chip with tiles has these vectors.
    if Avx512::detect().is_none() || !is_x86_feature_detected!("avx512bf16") {
        return false;
    }
    features() & (BF16 | TILES) == BF16 | TILES
}

/// What the processor says of its tiles, where it has AVX-512.
fn features() -> u32 {
    // SAFETY: there is a leaf 7, where AVX-512 was found. Newer compilers know that the instruction is always safe.
    #[allow(unused_unsafe)]
    let leaf = unsafe { __cpuid_count(7, 0) };
    leaf.edx
}

/// Asks the kernel for the tile registers: 8 KiB of state that a process has only on request.
#[cfg(target_os = "linux")]
fn ask() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: the call takes two numbers and touches no memory of ours; `syscall` changes rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack)
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn ask() -> bool {
    false
}

/// This thread's tile registers, all 16 rows of 64 bytes.
pub(crate) struct Tiles(PhantomData<*mut ()>);

/// The left operand of a product of tiles: 32 rows of 64 bytes a step.
#[derive(Clone, Copy)]
pub(crate) enum Left {
    /// For every step two tiles, one below the other.
    Tiles(*const u8),
    /// Rows where they lie, `stride` bytes apart; on the way they are copied to `tiles`, as [`Left::Tiles`] has them.
    Rows { first: *const u8, stride: usize, tiles: *mut u8 },
}

/// The operands of a product of tiles.
#[derive(Clone, Copy)]
pub(crate) struct Pair {
    pub a: Left,
    /// For every step two tiles, side by side: 16 rows, each of 4 bytes of the sum for 16 columns.
    pub b: *const u8,
    /// Four tiles of sums: top left, top right, bottom left, bottom right.
    pub c: *mut u8,
    pub steps: usize,
    pub add: bool,
}

/// What the tiles of a product hold.
pub(crate) trait Numbers {
    /// Whether they are bytes, with sums of 32 bits, and not bf16 with sums in f32.
    const BYTES: bool;
}

/// bf16.
pub(crate) struct OfHalves;
/// Signed bytes.
pub(crate) struct OfBytes;

impl Numbers for OfHalves {
    const BYTES: bool = false;
}

impl Numbers for OfBytes {
    const BYTES: bool = true;
}

/// The four products of a step: left tiles in 4 and 5, right ones in 6 and 7. A load stands before its first use, so
/// that products begin before all four are there.
macro_rules! step {
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

/// [`step!`] of bytes, where it is the left operand that changes from product to product and so comes first.
///
/// # Safety
/// The machine multiplies bytes in tiles; both hold two tiles.
#[inline(always)]
unsafe fn step_of_bytes(a: *const u8, b: *const u8) {
    // SAFETY: the caller's promise.
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

impl Tiles {
    /// Writes the 32 × 32 sums of `a · b`, added to what is there when `add`. After every step `meanwhile` is told its
    /// number: products take long enough for something else to be done beside them.
    ///
    /// One operand is the same for many products in a row and stays in the first-level cache: of bf16 the left one, of
    /// bytes the right one. Loading the other with a hint keeps it from driving that one out.
    ///
    /// # Safety
    /// The machine multiplies such numbers; `b` holds `2 · steps` tiles of [`TILE_BYTES`], as `a`'s tiles do, or its 32
    /// rows `64 · steps` bytes; `c` holds four tiles. `meanwhile` doesn't use tile registers.
    #[inline(always)]
    pub unsafe fn multiply<N: Numbers>(&mut self, p: Pair, mut meanwhile: impl FnMut(usize)) {
        // SAFETY: the configuration is in place as long as `self` lives; the memory is as the caller promises. The
        // compiler has no use of its own for tile registers, so that they keep their sums from one block of
        // assembly to the next.
        unsafe {
            self.begin(p.c, p.add);
            match p.a {
                Left::Tiles(tiles) => {
                    for step in 0..p.steps {
                        let at = step * 2 * TILE_BYTES;
                        let a = tiles.add(at);
                        let operands = (a, a.add(TILE_BYTES), 64, p.b.add(at));
                        match N::BYTES {
                            false => step!(operands, [], {}),
                            true => step_of_bytes(a, p.b.add(at)),
                        }
                        meanwhile(step);
                    }
                }
                Left::Rows { first, stride, tiles } => {
                    assert!(!N::BYTES, "bytes always lie as tiles");
                    for step in 0..p.steps {
                        let at = step * 2 * TILE_BYTES;
                        let a = first.add(step * 64);
                        let (operands, to) = ((a, a.add(16 * stride), stride, p.b.add(at)), tiles.add(at));
                        step!(
                            operands,
                            ["tilestored [{to} + {line}], tmm4", "tilestored [{to} + {line} + 1024], tmm5"],
                            { to = in(reg) to, }
                        );
                        meanwhile(step);
                    }
                }
            }
            self.end(p.c);
        }
    }

    /// Gets the sums that are added to, or zeros.
    #[inline(always)]
    unsafe fn begin(&mut self, c: *mut u8, add: bool) {
        // SAFETY: as in `multiply`.
        unsafe {
            match add {
                true => asm!(
                    "tileloaddt1 tmm0, [{c} + {line}]",
                    "tileloaddt1 tmm1, [{c} + {line} + 1024]",
                    "tileloaddt1 tmm2, [{c} + {line} + 2048]",
                    "tileloaddt1 tmm3, [{c} + {line} + 3072]",
                    c = in(reg) c,
                    line = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    options(nostack, readonly, preserves_flags)
                ),
                false => asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    options(nostack, nomem, preserves_flags)
                ),
            }
        }
    }

    /// Writes the sums.
    #[inline(always)]
    unsafe fn end(&mut self, c: *mut u8) {
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

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: leaves the registers as a thread has them that never used them, so that switching threads is cheap.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
