use rayon::ThreadPoolBuilder;

/// Runs `work` with rayon's parallel iterators limited to this many threads, at least one.
pub(crate) fn with_threads<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    match ThreadPoolBuilder::new().num_threads(threads.max(1)).build() {
        Ok(pool) => pool.install(work),
        // The system has no threads to spare: use those of the shared pool.
        Err(_) => work(),
    }
}
