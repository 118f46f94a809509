//! Compiles and packs the kernels that a release has inside ([`BuiltInKernels`]).

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_base::lock;

use crate::built_in::{self, BuiltInKernels};
use crate::compile::Compiler;
use crate::error::{Error, Result};
use crate::sources::KernelSource;
use crate::target::CompileTarget;

/// Compiles `sources` for `targets`, and for those that they are compressed against, on all cores, and returns the packed
/// file. `report` hears of each finished one.
///
/// Sources that have not changed since `previous` are taken from there, if the same compiler made it.
pub fn compile_for_release(
    compiler: &Compiler,
    sources: &[KernelSource],
    targets: &[CompileTarget],
    previous: &BuiltInKernels<'_>,
    report: impl Fn(&KernelSource, &CompileTarget, usize) + Sync,
) -> Result<Vec<u8>> {
    let (major, minor) = compiler.version();
    let compiler_version = format!("{major}.{minor}");
    let targets = &with_similar(targets);
    let same_compiler = previous.compiler() == Some(compiler_version.as_bytes());
    let targets_of = |source: &KernelSource| {
        let source = *source;
        targets.iter().filter(move |target| target.takes(&source))
    };
    let (kept, changed): (Vec<_>, Vec<_>) = sources.iter().partition(|source| {
        same_compiler && targets_of(source).all(|target| previous.contains(source, target))
    });
    let jobs: Vec<_> = changed.iter().flat_map(|&s| targets_of(s).map(move |t| (s, t))).collect();
    let images = in_parallel(&jobs, |&(source, target)| {
        let image = compiler.compile(source, target)?;
        report(source, target, image.len());
        Ok(image)
    })?;
    let images: HashMap<(&str, &str), Vec<u8>> =
        jobs.iter().map(|(source, target)| (source.name, target.arch.as_str())).zip(images).collect();
    let packed = in_parallel(&jobs, |&(source, target)| {
        let similar = target.similar();
        let similar = similar.as_ref().and_then(|similar| images.get(&(source.name, similar.arch.as_str())));
        built_in::pack(&images[&(source.name, target.arch.as_str())], similar.map(Vec::as_slice), target)
            .map_err(|e| Error::Call { call: "LZMA", what: e.to_string() })
    })?;
    let key = |source: &KernelSource, target: &CompileTarget| target.key(source).as_str().to_owned();
    let mut entries = vec![(BuiltInKernels::COMPILER.to_owned(), compiler_version.as_bytes())];
    for ((source, target), packed) in jobs.iter().zip(&packed) {
        entries.push((key(source, target), packed));
    }
    for (source, target) in kept.iter().flat_map(|&s| targets_of(s).map(move |t| (s, t))) {
        entries.extend(previous.packed(source, target).map(|packed| (key(source, target), packed)));
    }
    // The same kernels give the same file.
    entries.sort();
    Ok(kiln_pack::join(entries.iter().map(|(name, packed)| (name.as_str(), *packed))))
}

/// The targets, and those that they are compressed against.
fn with_similar(targets: &[CompileTarget]) -> Vec<CompileTarget> {
    let mut all: Vec<CompileTarget> = Vec::new();
    for target in targets.iter().flat_map(|target| target.similar().into_iter().chain([target.clone()])) {
        if !all.contains(&target) {
            all.push(target);
        }
    }
    all
}

/// Calls `work` for each job, on all cores.
fn in_parallel<J: Sync, T: Send>(jobs: &[J], work: impl Fn(&J) -> Result<T> + Sync) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(jobs.len()));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(i) else { break };
                    let result = work(job);
                    lock(&done).push((i, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_default();
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}
