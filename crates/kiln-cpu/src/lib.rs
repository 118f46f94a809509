//! The operations of [`kiln_ops::Backend`] on the CPU: on several threads, with vector instructions chosen at run time,
//! and with weights read directly from the host's (perhaps memory-mapped) bytes.
//!
//! ```
//! use kiln_cpu::{CpuBackend, CpuOptions};
//! use kiln_ops::{Backend, Residency};
//! use kiln_tensor::{DType, HostTensor, HostLinear};
//!
//! let b = CpuBackend::new(CpuOptions::default())?;
//! let weight = HostTensor::from_f32([1, 2], vec![2.0, 3.0])?;
//! let w = b.load_weight(HostLinear::dense(vec![weight])?, Residency::Device)?;
//! let x = b.upload(&HostTensor::from_f32([1, 2], vec![10.0, 1.0])?, DType::F32)?;
//! assert_eq!(b.download(&b.linear(&x, &w)?)?.to_f32()?[0], 23.0);
//! # Ok::<(), kiln_ops::Error>(())
//! ```
//!
//! Results don't depend on the number of threads, to the last bit: work is split by what it writes, and every sum has a
//! fixed order. Between instruction sets the last bits differ.

mod backend;
mod buffer;
mod element;
mod gemm;
mod isa;
mod math;
mod matrix;
mod ops;
mod parallel;
mod peaks;
mod simd;
mod tensor;
mod weight;

pub use backend::{CpuBackend, CpuOptions};
pub use isa::Isa;
pub use peaks::{Peak, Peaks};
pub use tensor::CpuTensor;
pub use weight::{CpuConv, CpuWeight};

use std::sync::Arc;

use kiln_ops::Result;

use buffer::{Buffer, BufferPool};
use isa::Level;
use parallel::Pool;

/// What every operation needs to run.
#[derive(Clone)]
pub(crate) struct Context {
    pub level: Level,
    pub pool: Arc<Pool>,
    pub buffers: Arc<BufferPool>,
}

/// Elements of a task that works row by row.
const ELEMENTS_PER_TASK: usize = 1 << 14;

impl Context {
    /// A buffer with arbitrary values, to be overwritten.
    pub fn buffer<T: bytemuck::Pod>(&self, len: usize) -> Result<Buffer<T>> {
        self.buffers.buffer(len)
    }

    /// Calls `work` with the index of every `width`-element row of `out` and the row.
    pub fn for_each_row<T: Send + Sync>(
        &self,
        out: &mut [T],
        width: usize,
        work: impl Fn(usize, &mut [T]) + Sync,
    ) {
        // An empty scratch can't fail.
        let _ = self.for_each_row_with(out, width, || Ok(()), |row, out, ()| work(row, out));
    }

    /// [`Context::for_each_row`] where each thread has a `scratch` of its own.
    pub fn for_each_row_with<T: Send + Sync, S>(
        &self,
        out: &mut [T],
        width: usize,
        scratch: impl Fn() -> Result<S> + Sync,
        work: impl Fn(usize, &mut [T], &mut S) + Sync,
    ) -> Result<()> {
        if width == 0 {
            return Ok(());
        }
        let rows = (ELEMENTS_PER_TASK / width).max(1);
        self.pool.for_each_chunk_with(out, rows * width, scratch, |chunk, out, scratch| {
            for (i, out) in out.chunks_exact_mut(width).enumerate() {
                work(chunk * rows + i, out, scratch);
            }
        })
    }
}
