//! The operations of [`kiln_ops::Backend`] on the CPU: several threads, vector instructions chosen at run time, weights
//! used straight out of the host's (perhaps mapped) bytes.
//!
//! ```
//! use kiln_cpu::{CpuBackend, Options};
//! use kiln_ops::{Backend, Residency};
//! use kiln_tensor::{DType, HostTensor, LinearParts};
//!
//! let b = CpuBackend::new(Options::default())?;
//! let weight = HostTensor::from_f32([1, 2], vec![2.0, 3.0])?;
//! let w = b.weight(LinearParts::dense(vec![weight])?, Residency::Device)?;
//! let x = b.upload(&HostTensor::from_f32([1, 2], vec![10.0, 1.0])?, DType::F32)?;
//! assert_eq!(b.download(&b.linear(&x, &w)?)?.to_f32()?[0], 23.0);
//! # Ok::<(), kiln_ops::Error>(())
//! ```
//!
//! Results do not depend on the number of threads, down to the last bit: work is cut by what it writes, and every sum
//! has one order. Between instruction sets the last bits differ.

mod backend;
mod buffer;
mod element;
mod gemm;
mod isa;
mod math;
mod ops;
mod parallel;
mod peaks;
mod simd;
mod tensor;
mod weight;

pub use backend::{CpuBackend, Options};
pub use isa::Isa;
pub use peaks::{Peak, Peaks};
pub use tensor::CpuTensor;
pub use weight::{CpuConv, CpuWeight};

use std::sync::Arc;

use kiln_ops::Result;

use buffer::{Buffer, Memory};
use isa::Level;
use parallel::Pool;

/// What every operation needs to run.
#[derive(Clone)]
pub(crate) struct Context {
    pub level: Level,
    pub pool: Arc<Pool>,
    pub memory: Arc<Memory>,
}

/// Elements a thread takes at a time when it works row by row.
const ROWS_PIECE: usize = 1 << 14;

impl Context {
    /// A buffer to be written; what is in it before is left from earlier work.
    pub fn buffer<T: bytemuck::Pod>(&self, len: usize) -> Result<Buffer<T>> {
        self.memory.buffer(len)
    }

    /// Calls `work` with the number of every `width`-element row of `out` and the row.
    pub fn rows<T: Send + Sync>(&self, out: &mut [T], width: usize, work: impl Fn(usize, &mut [T]) + Sync) {
        // Making nothing can't fail.
        let _ = self.rows_with(out, width, || Ok(()), |row, out, ()| work(row, out));
    }

    /// [`Context::rows`], where each thread has a `scratch` of its own.
    pub fn rows_with<T: Send + Sync, W>(
        &self,
        out: &mut [T],
        width: usize,
        scratch: impl Fn() -> Result<W> + Sync,
        work: impl Fn(usize, &mut [T], &mut W) + Sync,
    ) -> Result<()> {
        if width == 0 {
            return Ok(());
        }
        let count = (ROWS_PIECE / width).max(1);
        self.pool.pieces_with(out, count * width, scratch, |piece, out, scratch| {
            for (i, out) in out.chunks_exact_mut(width).enumerate() {
                work(piece * count + i, out, scratch);
            }
        })
    }
}
