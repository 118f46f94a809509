//! Spreading work over threads.
//!
//! Work is cut by what it writes, never inside a sum, so that results do not depend on the number of threads.

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
    /// `threads` of them, or as many as the machine runs at once.
    pub fn new(threads: Option<usize>) -> Result<Pool> {
        let threads = threads.filter(|&n| n > 0);
        let threads = threads.or_else(|| std::thread::available_parallelism().ok().map(NonZeroUsize::get));
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads.unwrap_or(1))
            .thread_name(|i| format!("kiln-cpu-{i}"))
            .build()
            .map(|pool| Pool { pool })
            .map_err(|e| Error::Device { backend: "cpu".into(), what: format!("no threads: {e}") })
    }

    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Calls `work` with every number below `tasks`. Each thread takes the next number when it is done with one.
    pub fn each(&self, tasks: usize, work: impl Fn(usize) + Sync) {
        let nothing = || Ok(());
        // Making nothing can't fail.
        let _ = self.each_with(tasks, nothing, |task, ()| work(task));
    }

    /// [`Pool::each`], where each thread has a `scratch` of its own.
    pub fn each_with<W>(
        &self,
        tasks: usize,
        scratch: impl Fn() -> Result<W> + Sync,
        work: impl Fn(usize, &mut W) + Sync,
    ) -> Result<()> {
        if tasks == 0 {
            return Ok(());
        }
        if tasks == 1 || self.threads() == 1 {
            let mut scratch = scratch()?;
            (0..tasks).for_each(|task| work(task, &mut scratch));
            return Ok(());
        }
        let next = AtomicUsize::new(0);
        let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&task| task < tasks);
        let results = self.pool.broadcast(|_| {
            let Some(first) = take() else { return Ok(()) };
            let mut scratch = scratch()?;
            work(first, &mut scratch);
            while let Some(task) = take() {
                work(task, &mut scratch);
            }
            Ok(())
        });
        results.into_iter().collect()
    }

    /// Calls `work` with the number of every `len`-element piece of `out` and the piece.
    pub fn pieces<T: Send + Sync>(&self, out: &mut [T], len: usize, work: impl Fn(usize, &mut [T]) + Sync) {
        // Making nothing can't fail.
        let _ = self.pieces_with(out, len, || Ok(()), |i, out, ()| work(i, out));
    }

    /// [`Pool::pieces`], where each thread has a `scratch` of its own.
    pub fn pieces_with<T: Send + Sync, W>(
        &self,
        out: &mut [T],
        len: usize,
        scratch: impl Fn() -> Result<W> + Sync,
        work: impl Fn(usize, &mut [T], &mut W) + Sync,
    ) -> Result<()> {
        let (len, total) = (len.max(1), out.len());
        let out = Disjoint::new(out);
        self.each_with(total.div_ceil(len), scratch, |task, scratch| {
            let start = task * len;
            // SAFETY: every task has a range of its own.
            work(task, unsafe { out.slice(start..total.min(start + len)) }, scratch);
        })
    }
}

/// A slice that several threads write, each its own part.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]` whose parts are handed out once each, as `slice` demands.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Self {
        Disjoint { start: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// Where element `i` is, or would be.
    pub fn place(&self, i: usize) -> *const T {
        self.start.wrapping_add(i)
    }

    /// # Safety
    /// No two slices in use at one time overlap.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice this was made from; not aliased, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_visited_once() {
        for threads in [1, 3] {
            let pool = Pool::new(Some(threads)).unwrap();
            for (len, piece) in [(0, 4), (1, 4), (103, 10), (5, 0)] {
                let mut out = vec![0; len];
                pool.pieces(&mut out, piece, |i, part| part.iter_mut().for_each(|x| *x += i + 1));
                let expected: Vec<usize> = (0..len).map(|i| i / piece.max(1) + 1).collect();
                assert_eq!(out, expected);
            }
        }
    }
}
