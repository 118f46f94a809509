//! Kernels inside the program: compiled before it was built, so that a GPU needs nothing but its driver.
//!
//! `tools/cuda/kernels.sh` writes the file that the build script embeds; without it the program has none. Each source's
//! machine code for each target is an entry of its own ([`kiln_pack::join`]), named by its key: a source that has changed
//! since has another key and is not found.
//!
//! Entries are LZMA streams: 0.5 MB for an architecture, where zstd takes 0.6 and deflate 0.8, and 40 ms to unpack all of it
//! on one core, where they take 20 and 10. An image needs a third, which is unpacked in parallel while weights load.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::sync::LazyLock;

use lzma_rust2::{LzmaOptions, LzmaReader, LzmaWriter};

use crate::sources::{KernelSource, kernel_sources};
use crate::target::CompileTarget;

static BUILT_IN: LazyLock<BuiltInKernels<'static>> =
    LazyLock::new(|| BuiltInKernels::new(include_bytes!(concat!(env!("OUT_DIR"), "/compiled.packed"))));

/// Compiled kernels, packed.
pub struct BuiltInKernels<'a> {
    entries: BTreeMap<String, &'a [u8]>,
}

impl<'a> BuiltInKernels<'a> {
    /// The entry with the compiler's version.
    pub(crate) const COMPILER: &'static str = "compiler";

    /// The kernels inside this program.
    pub fn of_program() -> &'static BuiltInKernels<'static> {
        &BUILT_IN
    }

    /// Reads the index of a packed file; one that is empty or damaged has no kernels.
    pub fn new(file: &'a [u8]) -> BuiltInKernels<'a> {
        BuiltInKernels { entries: kiln_pack::split(file) }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The version of the compiler.
    pub(crate) fn compiler(&self) -> Option<&'a [u8]> {
        self.entries.get(BuiltInKernels::COMPILER).copied()
    }

    /// Whether the source's kernels are there for this target, compiled from today's text.
    pub fn contains(&self, source: &KernelSource, target: &CompileTarget) -> bool {
        self.entries.contains_key(target.key(source).as_str())
    }

    /// The targets with machine code of every source.
    pub fn targets(&self) -> Vec<CompileTarget> {
        let has = |source: &KernelSource, target: &CompileTarget| {
            !target.takes(source) || self.contains(source, target)
        };
        let complete = |target: &CompileTarget| kernel_sources().all(|source| has(&source, target));
        if self.is_empty() { Vec::new() } else { CompileTarget::built_in().filter(complete).collect() }
    }

    /// The packed form of a source's machine code.
    pub fn packed(&self, source: &KernelSource, target: &CompileTarget) -> Option<&'a [u8]> {
        self.entries.get(target.key(source).as_str()).copied()
    }

    /// Unpacks a source's machine code.
    pub fn image(&self, source: &KernelSource, target: &CompileTarget) -> Option<Vec<u8>> {
        let packed = self.packed(source, target)?;
        let similar = match target.similar() {
            Some(similar) => Some(self.image(source, &similar)?),
            None => None,
        };
        unpack(packed, similar.as_deref())
    }
}

/// Compresses an image, given one that it resembles: properties, length (4 bytes), LZMA stream.
pub(crate) fn pack(image: &[u8], similar: Option<&[u8]>, target: &CompileTarget) -> io::Result<Vec<u8>> {
    let mut options = LzmaOptions::with_preset(9);
    options.nice_len = LzmaOptions::NICE_LEN_MAX;
    options.dict_size = dict_size(image.len(), similar);
    options.preset_dict = similar.map(<[u8]>::to_vec);
    // An instruction has 16 bytes; PTX is text.
    (options.lc, options.pb) = if target.is_machine_code() { (0, 4) } else { (3, 0) };
    let mut packed = vec![options.get_props()];
    packed.extend((image.len() as u32).to_le_bytes());
    let mut writer = LzmaWriter::new_no_header(packed, &options, false)?;
    writer.write_all(image)?;
    writer.finish()
}

/// Reverses [`pack`]; `None` if the data is damaged.
fn unpack(packed: &[u8], similar: Option<&[u8]>) -> Option<Vec<u8>> {
    let (&[properties, ref length @ ..], stream) = packed.split_first_chunk::<5>()?;
    let length = u32::from_le_bytes(*length);
    let dict_size = dict_size(length as usize, similar);
    let mut image = Vec::new();
    LzmaReader::new_with_props(stream, length.into(), properties, dict_size, similar)
        .and_then(|mut reader| reader.read_to_end(&mut image))
        .ok()?;
    Some(image)
}

fn dict_size(length: usize, similar: Option<&[u8]>) -> u32 {
    (length + similar.map_or(0, <[u8]>::len)).max(4096) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Machine code that has little in common with another.
    fn code(seed: u8) -> Vec<u8> {
        (0..20_000u32)
            .flat_map(|i| (i.wrapping_mul(2_654_435_761) >> 9).to_le_bytes())
            .map(|b| b ^ seed)
            .collect()
    }

    fn file(entries: &[(&'static str, CompileTarget, Vec<u8>)]) -> Vec<u8> {
        let name =
            |target: &CompileTarget, source| target.key(&KernelSource { name: source }).as_str().to_owned();
        let named: Vec<_> =
            entries.iter().map(|(source, target, packed)| (name(target, source), packed)).collect();
        kiln_pack::join(named.iter().map(|(name, packed)| (name.as_str(), packed.as_slice())))
    }

    #[test]
    fn images_come_back_alone_and_as_differences() {
        let [ampere, ada, ptx] = ["sm_86", "sm_89", "compute_100"].map(CompileTarget::new);
        let base = code(0);
        let mut changed = base.clone();
        changed[40_000..40_016].fill(7);
        let difference = pack(&changed, Some(&base), &ada).unwrap();
        assert!(difference.len() < 1000, "{}", difference.len());
        let text = b".version 8.8".repeat(1000);
        let file = file(&[
            ("norm", ampere.clone(), pack(&base, None, &ampere).unwrap()),
            ("norm", ada.clone(), difference),
            ("norm", ptx.clone(), pack(&text, None, &ptx).unwrap()),
        ]);
        let kernels = BuiltInKernels::new(&file);
        let norm = KernelSource { name: "norm" };
        assert_eq!(kernels.image(&norm, &ampere), Some(base));
        assert_eq!(kernels.image(&norm, &ada), Some(changed));
        assert_eq!(kernels.image(&norm, &ptx), Some(text));
        assert_eq!(kernels.image(&KernelSource { name: "rope" }, &ampere), None);
        assert!(kernels.targets().is_empty());
    }

    #[test]
    fn machine_code_of_a_changed_source_is_not_found() {
        let target = CompileTarget::new("sm_90a");
        let norm = KernelSource { name: "norm" };
        let stale = format!("{}0", target.key(&norm).as_str());
        let packed = pack(&code(1), None, &target).unwrap();
        let file = kiln_pack::join([(stale.as_str(), packed.as_slice())]);
        assert_eq!(BuiltInKernels::new(&file).image(&norm, &target), None);
    }

    #[test]
    fn damage_is_a_miss() {
        let target = CompileTarget::new("sm_90a");
        let packed = pack(&code(2), None, &target).unwrap();
        assert_eq!(unpack(&packed, None), Some(code(2)));
        for length in [0, 4, 5, 20, packed.len() / 2] {
            assert_eq!(unpack(&packed[..length], None), None, "{length}");
        }
        assert_eq!(unpack(&[0xff; 100], None), None);
    }
}
