//! A kernel, its parameters, and how it is launched.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;

use crate::error::Result;
use crate::queue::Queue;
use crate::sources::Source;

/// A value that a kernel takes, with the size and layout it has there.
///
/// # Safety
///
/// The type is laid out like the one it is called there.
pub(crate) unsafe trait Argument: Copy {
    /// The type's name there; `*` is any pointer.
    #[cfg(test)]
    const TYPE: &'static str;
}

/// The parameters of a kernel.
pub(crate) trait Parameters {
    /// Their names and types.
    #[cfg(test)]
    const LIST: &'static [(&'static str, &'static str)];

    /// Hands on where each lies.
    fn with_pointers<T>(&self, call: impl FnOnce(&mut [*mut c_void]) -> T) -> T;
}

/// Where an argument lies, for the launch that copies it.
pub(super) fn pointer<T: Argument>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// A kernel that takes the parameters `P`.
pub(crate) struct Kernel<P> {
    source: &'static Source,
    name: &'static str,
    parameters: PhantomData<fn(&P)>,
}

impl<P: Parameters> Kernel<P> {
    /// The kernel of that name in a source; `table.rs` alone declares them.
    pub(super) const fn new(source: &'static Source, name: &'static str) -> Kernel<P> {
        Kernel { source, name, parameters: PhantomData }
    }

    /// Puts it on a queue: blocks of so many threads and bytes of shared memory in a grid. An empty grid is no work.
    ///
    /// What pointers point to is as large as the kernel takes it to be: launchers check sizes before.
    pub fn launch(
        self,
        queue: &Queue,
        grid: [usize; 2],
        threads: usize,
        shared: usize,
        parameters: &P,
    ) -> Result<()> {
        parameters.with_pointers(|pointers| {
            // SAFETY: the parameters are the kernel's, by its declaration; the launcher has checked their sizes.
            unsafe { queue.launch(self.source, self.name, grid, threads, shared, pointers) }
        })
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
