mod census;
mod form;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use kiln_tensor::{DType, HostTensor, Shape};

use crate::coding;
use crate::file::{WeightFile, not_found_or};
use crate::folder::{self, Weights};
use crate::header::Entry;
use crate::layout::{self, Component};
use crate::pages::{Pages, Span};
use crate::placed::{Placed, Slab};
use crate::synthetic::Synthetic;
use crate::{Error, LinearForm, Result, Vars, index, int8, near, quantise};

/// One or more safetensors or GGUF files read as one set of named tensors. Nothing changes it, and clones share it.
///
/// Opening reads the headers only; the data stays in the mapped files and is read when it is used.
#[derive(Clone, Debug)]
pub struct WeightSource {
    path: PathBuf,
    files: Arc<[WeightFile]>,
    /// By name.
    tensors: Arc<BTreeMap<String, Placed>>,
    metadata: Arc<BTreeMap<String, String>>,
    /// Answers for tensors that are in no file.
    synthetic: Option<Arc<Synthetic>>,
}

impl WeightSource {
    /// Opens a safetensors or GGUF file, a list of shards (`X.safetensors.index.json`), or a component folder.
    ///
    /// In a folder a list of shards comes first, then a single file. Of several the one named
    /// `diffusion_pytorch_model` or `model` is taken, and a variant such as `model.fp16.safetensors` only when there
    /// is no plain file. If that leaves a choice, it is an error.
    ///
    /// Tensors have the names that the file gives them; [`WeightSource::component`] gives them the model's. Scales that
    /// belong to other tensors are taken with these and are not listed.
    ///
    /// The files are mapped into memory and must not be changed while the source or one of its tensors lives. To
    /// replace a weight file under a running program, write a new one and rename it over the old.
    pub fn open(path: impl AsRef<Path>) -> Result<WeightSource> {
        let path = path.as_ref();
        let about = std::fs::metadata(path).map_err(|e| not_found_or(path, e))?;
        let weights = match about.is_dir() {
            true => folder::find(path)?,
            false if folder::is_index(path) => Weights::Index(path.to_owned()),
            false => Weights::File(path.to_owned()),
        };
        let files = match weights {
            Weights::Index(index) => index::open(&index)?,
            Weights::File(file) => vec![WeightFile::open(&file)?],
        };
        WeightSource::join(path, files)
    }

    /// Reads a safetensors or GGUF file that is already in memory, perhaps as a part of the program; `name` stands for its path
    /// in messages. Nothing is copied.
    pub fn from_bytes(name: impl AsRef<Path>, data: impl Into<Bytes>) -> Result<WeightSource> {
        let path = name.as_ref();
        WeightSource::join(path, vec![WeightFile::from_bytes(path, data.into())?])
    }

    /// A source without files that gives random bf16 values for every tensor asked for by its shape, so that a model can
    /// be measured without its weights. At most `budget` bytes are made; tensors beyond that share memory with others.
    ///
    /// ```
    /// let source = kiln_weights::WeightSource::synthetic(1 << 20);
    /// assert_eq!(source.root().linear("any.name", 30, 20)?.rows(), 30);
    /// assert_eq!(source.synthetic_bytes(), Some((1200, 1200)));
    /// # Ok::<(), kiln_weights::Error>(())
    /// ```
    pub fn synthetic(budget: u64) -> WeightSource {
        WeightSource {
            path: "synthetic weights".into(),
            files: Arc::new([]),
            tensors: Arc::default(),
            metadata: Arc::default(),
            synthetic: Some(Arc::new(Synthetic::new(budget))),
        }
    }

    /// Of a [synthetic](WeightSource::synthetic) source: bytes of the matrices it gave, and of the memory behind them.
    pub fn synthetic_bytes(&self) -> Option<(u64, u64)> {
        self.synthetic.as_ref().map(|synthetic| synthetic.sizes())
    }

    fn join(path: &Path, mut files: Vec<WeightFile>) -> Result<WeightSource> {
        let mut tensors = BTreeMap::<String, (usize, Entry)>::new();
        let mut metadata = BTreeMap::new();
        for i in 0..files.len() {
            for (name, entry) in std::mem::take(&mut files[i].entries) {
                if let Some((first, _)) = tensors.get(&name) {
                    return Err(Error::DuplicateTensor {
                        tensor: name,
                        first: files[*first].path.clone(),
                        second: files[i].path.clone(),
                    });
                }
                tensors.insert(name, (i, entry));
            }
            for (key, value) in std::mem::take(&mut files[i].metadata) {
                metadata.entry(key).or_insert(value);
            }
        }
        coding::attach(&mut tensors, &files, &metadata)?;
        let placed = tensors.into_iter().map(|(name, (file, entry))| (name, Placed::whole(file, entry)));
        Ok(WeightSource {
            path: path.to_owned(),
            tensors: Arc::new(placed.collect()),
            files: files.into(),
            metadata: Arc::new(metadata),
            synthetic: None,
        })
    }

    /// A cursor at the top, with an empty prefix: linear layers as floats, without LoRAs.
    pub fn root(&self) -> Vars<'_> {
        Vars::new(self)
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The file or folder that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that are read: one, or the shards.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|f| f.path.as_path())
    }

    /// The `__metadata__` of the header; of several shards with the same key the first one's.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Dtype and shape of a tensor, without touching its data. Packed ones are of bytes.
    pub fn entry(&self, name: &str) -> Option<(DType, &Shape)> {
        self.tensors.get(name).map(|placed| (placed.entry.dtype, &placed.shape))
    }

    /// The tensors of one part under the model's names, whatever the file calls them and however it lays them out; `None`
    /// when it has no such part.
    ///
    /// ```
    /// use kiln_tensor::HostTensor;
    /// use kiln_weights::{Component, WeightSource, save};
    ///
    /// let dir = tempfile::tempdir()?;
    /// let file = dir.path().join("flux-2-klein-4b.safetensors");
    /// let weights = [
    ///     ("model.diffusion_model.single_stream_modulation.lin.weight", HostTensor::zeros([6, 2])),
    ///     ("model.diffusion_model.double_blocks.0.img_attn.qkv.weight", HostTensor::zeros([6, 2])),
    /// ];
    /// save::save(&file, &weights, &Default::default())?;
    /// let transformer = WeightSource::open(&file)?.component(Component::Transformer)?.unwrap();
    /// assert_eq!(transformer.tensor("transformer_blocks.0.attn.to_v.weight")?.shape().dims(), [2, 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn component(&self, component: Component) -> Result<Option<WeightSource>> {
        let mut parts = layout::find(self.names()).into_iter();
        let Some(found) = parts.find(|f| f.naming.component == component) else { return Ok(None) };
        let mut tensors = BTreeMap::new();
        for (name, placed) in &*self.tensors {
            for (ours, view) in found.translate(name) {
                let seen = placed.seen(view).ok_or_else(|| Error::Cut {
                    file: self.files[placed.file].path.clone(),
                    tensor: name.clone(),
                    found: placed.shape.clone(),
                    parts: format!("such as `{ours}`"),
                })?;
                tensors.insert(ours, seen);
            }
        }
        let mut metadata = BTreeMap::clone(&self.metadata);
        for (theirs, ours) in layout::SETTINGS {
            let known = self.metadata.iter().find(|(key, _)| key.ends_with(theirs));
            metadata.extend(known.map(|(_, value)| (ours.to_owned(), value.clone())));
        }
        Ok(Some(WeightSource { metadata: Arc::new(metadata), ..self.with_tensors(tensors) }))
    }

    /// [`WeightSource::open`] of a file or folder that must have this part.
    pub fn open_component(path: impl AsRef<Path>, component: Component) -> Result<WeightSource> {
        let source = WeightSource::open(path)?;
        let missing =
            || Error::OtherComponent { file: source.path.clone(), component, found: source.describe() };
        source.component(component)?.ok_or_else(missing)
    }

    fn with_tensors(&self, tensors: BTreeMap<String, Placed>) -> WeightSource {
        WeightSource {
            path: self.path.clone(),
            files: Arc::clone(&self.files),
            tensors: Arc::new(tensors),
            metadata: Arc::clone(&self.metadata),
            synthetic: None,
        }
    }

    /// The tensors whose names begin with `prefix` and a dot, under the rest of their names: one part of a
    /// model whose parts share a file. `None` when there are none.
    pub fn part(&self, prefix: &str) -> Option<WeightSource> {
        let rest = |name: &str| Some(name.strip_prefix(prefix)?.strip_prefix('.')?.to_owned());
        let tensors: BTreeMap<_, _> =
            self.tensors.iter().filter_map(|(name, place)| Some((rest(name)?, place.clone()))).collect();
        (!tensors.is_empty()).then(|| self.with_tensors(tensors))
    }

    /// The tensor of this name, sharing the file's bytes. A missing one is an error with the nearest names.
    ///
    /// An 8-bit tensor `X` with a scale for each of its rows in `X_scale` is given as the bf16 values it stands for, a
    /// packed one as f32.
    pub fn tensor(&self, name: &str) -> Result<HostTensor> {
        let placed = self.find(name)?;
        self.values(name, placed)
    }

    /// The tensor of this name without the scales of 8-bit rows.
    pub(crate) fn stored(&self, name: &str) -> Result<HostTensor> {
        self.find(name)?.tensor(&self.files, name)
    }

    fn values(&self, name: &str, placed: &Placed) -> Result<HostTensor> {
        let tensor = placed.tensor(&self.files, name)?;
        match self.scales(name, placed)? {
            None => Ok(tensor),
            Some(scales) => int8::widen(&tensor, &scales).map_err(unusable(self.file_of(placed), name)),
        }
    }

    fn file_of(&self, placed: &Placed) -> &WeightFile {
        &self.files[placed.file]
    }

    /// Lets go of the pages of a tensor after all of it was read.
    pub(crate) fn release(&self, name: &str) {
        if let Some(placed) = self.tensors.get(name) {
            self.file_of(placed).release(&placed.entry);
        }
    }

    /// The matrix `name`, which must have this shape, as a linear layer takes it: where it lies, packed as it is.
    pub(crate) fn slabs(&self, name: &str, shape: Shape) -> Result<Vec<Slab>> {
        if self.synthetic.is_some() || self.is_int8(name) {
            return Ok(vec![Slab::Dense(self.tensor_of(name, shape)?)]);
        }
        self.find_of(name, shape)?.slabs(&self.files, name)
    }

    /// The tensor of this name, which must have this shape.
    pub(crate) fn tensor_of(&self, name: &str, shape: Shape) -> Result<HostTensor> {
        if let Some(synthetic) = &self.synthetic {
            return synthetic.tensor(name, &shape).map_err(|source| Error::Tensor {
                file: self.path.clone(),
                tensor: name.to_owned(),
                source,
            });
        }
        let placed = self.find_of(name, shape)?;
        self.values(name, placed)
    }

    fn find_of(&self, name: &str, shape: Shape) -> Result<&Placed> {
        let placed = self.find(name)?;
        if placed.shape != shape {
            return Err(Error::Shape {
                file: self.file_of(placed).path.clone(),
                tensor: name.to_owned(),
                found: placed.shape.clone(),
                expected: shape,
            });
        }
        Ok(placed)
    }

    fn find(&self, name: &str) -> Result<&Placed> {
        match self.tensors.get(name) {
            Some(placed) => Ok(placed),
            None => Err(Error::Missing {
                file: self.path.clone(),
                tensor: name.to_owned(),
                near: near::nearest(name, self.names()),
                count: self.tensors.len(),
            }),
        }
    }

    /// Where the tensors whose names begin with `prefix` lie in mapped files, without those that this form rounds to 8 bits
    /// when they are loaded and doesn't read again.
    pub(crate) fn pages(&self, prefix: &str, form: LinearForm) -> Pages {
        let below = self.tensors.range(prefix.to_owned()..).take_while(|(name, _)| name.starts_with(prefix));
        let span = |(name, placed): (&String, &Placed)| {
            if matches!(form, LinearForm::Int8 { .. }) && quantise::rounds(self, name) {
                return None;
            }
            let range = placed.range();
            Some(Span { file: self.file_of(placed).mapped.clone()?, start: range.start, end: range.end })
        };
        Pages::new(below.filter_map(span).collect())
    }
}

fn unusable(file: &WeightFile, name: &str) -> impl FnOnce(kiln_tensor::Error) -> Error {
    |source| Error::Tensor { file: file.path.clone(), tensor: name.to_owned(), source }
}
