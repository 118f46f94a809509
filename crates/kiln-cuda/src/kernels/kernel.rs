//! Typed kernels and their launch.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;

use kiln_tensor::DType;

use crate::error::Result;
use crate::queue::Queue;
use crate::sources::KernelSource;

/// A value with the same layout in Rust and CUDA.
///
/// # Safety
///
/// The type has the layout of the CUDA type `TYPE`.
pub(crate) unsafe trait KernelArgument: Copy {
    /// Name of the CUDA type; `*` is any pointer.
    #[cfg(test)]
    const TYPE: &'static str;
}

/// The parameters of a kernel.
pub(crate) trait Parameters {
    /// Names and CUDA types.
    #[cfg(test)]
    const LIST: &'static [(&'static str, &'static str)];

    /// Calls `call` with pointers to all parameters.
    fn with_pointers<T>(&self, call: impl FnOnce(&mut [*mut c_void]) -> T) -> T;
}

/// Pointer to an argument, for the launch that copies it.
pub(crate) fn pointer<T: KernelArgument>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// A kernel with parameters `P`.
pub(crate) struct Kernel<P> {
    source: KernelSource,
    name: &'static str,
    parameters: PhantomData<fn(&P)>,
}

impl<P: Parameters> Kernel<P> {
    /// The kernel of that name in a source; only `kernels!` declares kernels.
    pub const fn new(source: &'static str, name: &'static str) -> Kernel<P> {
        Kernel { source: KernelSource { name: source }, name, parameters: PhantomData }
    }

    /// Launches the kernel with `threads` threads and `shared` bytes of shared memory per block. An empty grid does nothing.
    ///
    /// The caller has checked that the memory behind pointers is large enough.
    pub fn launch(
        self,
        queue: &Queue,
        grid: [usize; 2],
        threads: usize,
        shared: usize,
        parameters: &P,
    ) -> Result<()> {
        parameters.with_pointers(|pointers| {
            // SAFETY: the parameters match the kernel's declaration; the launcher has checked sizes.
            unsafe { queue.launch(&self.source, self.name, grid, threads, shared, pointers) }
        })
    }
}

/// The f32 and the bf16 form of a kernel.
pub(crate) struct KernelByDtype<P> {
    pub f32: Kernel<P>,
    pub bf16: Kernel<P>,
}

impl<P> KernelByDtype<P> {
    /// The kernel for activations of this dtype.
    pub fn of(self, dtype: DType) -> Kernel<P> {
        if dtype == DType::BF16 { self.bf16 } else { self.f32 }
    }
}

impl<P> Clone for Kernel<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for Kernel<P> {}

impl<P> fmt::Debug for Kernel<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
