//! Distribution of work among threads.
//!
//! Each backend has a rayon pool of its own, because the number of threads is one of its options. Tasks run in a loop over
//! a shared counter rather than as a parallel iterator: consecutive tasks share cached operands, which recursive
//! splitting would scatter; each thread makes its scratch memory once per call; and making it can fail.
//!
//! Work is split by what it writes, never inside a sum, so that results don't depend on the number of threads.

use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_ops::{Error, Result};

/// The threads of one backend.
pub(crate) struct Pool {
    pool: rayon::ThreadPool,
}

impl Pool {
    /// Starts `threads` threads; as many as the machine runs in parallel if that is `None` or 0.
    pub fn new(threads: Option<usize>) -> Result<Pool> {
        let threads = threads.filter(|&n| n > 0);
        let threads = threads.or_else(|| std::thread::available_parallelism().ok().map(NonZeroUsize::get));
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads.unwrap_or(1))
            .thread_name(|i| format!("kiln-cpu-{i}"))
            .build()
            .map(|pool| Pool { pool })
            .map_err(|e| Error::Device { backend: "cpu".into(), what: format!("cannot start threads: {e}") })
    }

    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Calls `work` with every index below `tasks`, in ascending order on each thread.
    pub fn for_each(&self, tasks: usize, work: impl Fn(usize) + Sync) {
        // An empty scratch can't fail.
        let _ = self.for_each_with(tasks, || Ok(()), |task, ()| work(task));
    }

    /// [`Pool::for_each`] where each thread has a `scratch` of its own.
    pub fn for_each_with<S>(
        &self,
        tasks: usize,
        scratch: impl Fn() -> Result<S> + Sync,
        work: impl Fn(usize, &mut S) + Sync,
    ) -> Result<()> {
        self.run(tasks, &|tasks| {
            let mut task = tasks.take();
            if task.is_none() {
                return Ok(());
            }
            let mut scratch = scratch()?;
            while let Some(index) = task {
                work(index, &mut scratch);
                task = tasks.take();
            }
            Ok(())
        })
    }

    /// Calls `thread` on every thread, or here if one is enough. Compiled once, not once for each kind of work.
    fn run(&self, count: usize, thread: &(dyn Fn(&Tasks) -> Result<()> + Sync)) -> Result<()> {
        let tasks = Tasks { next: AtomicUsize::new(0), count };
        if count <= 1 || self.threads() == 1 {
            return thread(&tasks);
        }
        self.pool.broadcast(|_| thread(&tasks)).into_iter().collect()
    }

    /// Calls `work` with the index of every `len`-element chunk of `out` and the chunk.
    pub fn for_each_chunk<T: Send + Sync>(
        &self,
        out: &mut [T],
        len: usize,
        work: impl Fn(usize, &mut [T]) + Sync,
    ) {
        // An empty scratch can't fail.
        let _ = self.for_each_chunk_with(out, len, || Ok(()), |i, out, ()| work(i, out));
    }

    /// [`Pool::for_each_chunk`] where each thread has a `scratch` of its own.
    pub fn for_each_chunk_with<T: Send + Sync, S>(
        &self,
        out: &mut [T],
        len: usize,
        scratch: impl Fn() -> Result<S> + Sync,
        work: impl Fn(usize, &mut [T], &mut S) + Sync,
    ) -> Result<()> {
        let (len, total) = (len.max(1), out.len());
        let out = DisjointMut::new(out);
        self.for_each_with(total.div_ceil(len), scratch, |task, scratch| {
            let start = task * len;
            // SAFETY: every task has a range of its own.
            work(task, unsafe { out.slice(start..total.min(start + len)) }, scratch);
        })
    }

    /// Calls `work` once on every thread, on all of them at the same time.
    pub fn broadcast<T: Send>(&self, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
        self.pool.broadcast(|thread| work(thread.index()))
    }
}

/// The tasks of one call, which its threads share.
struct Tasks {
    next: AtomicUsize,
    count: usize,
}

impl Tasks {
    /// The next task that no thread has taken.
    fn take(&self) -> Option<usize> {
        let task = self.next.fetch_add(1, Ordering::Relaxed);
        (task < self.count).then_some(task)
    }
}

/// A mutable slice that several threads write, each its own range.
pub(crate) struct DisjointMut<'a, T> {
    ptr: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]` whose ranges are handed out without overlap, as `slice` requires.
unsafe impl<T: Send> Sync for DisjointMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for DisjointMut<'_, T> {}

impl<'a, T> DisjointMut<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Self {
        DisjointMut { ptr: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// The address of element `i`, which may lie past the end: for prefetching.
    pub fn ptr(&self, i: usize) -> *const T {
        self.ptr.wrapping_add(i)
    }

    /// # Safety
    /// No two slices in use at the same time overlap.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice this was made from; not aliased, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_is_visited_once() {
        for threads in [1, 3] {
            let pool = Pool::new(Some(threads)).unwrap();
            for (len, chunk) in [(0, 4), (1, 4), (103, 10), (5, 0)] {
                let mut out = vec![0; len];
                pool.for_each_chunk(&mut out, chunk, |i, out| out.iter_mut().for_each(|x| *x += i + 1));
                let expected: Vec<usize> = (0..len).map(|i| i / chunk.max(1) + 1).collect();
                assert_eq!(out, expected);
            }
        }
    }
}
