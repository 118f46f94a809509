use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use kiln_tensor::packed::Format;
use kiln_tensor::{DType, Delta, HostTensor, Shape};

use crate::coding;
use crate::file::{WeightFile, not_found_or};
use crate::fingerprint::fingerprint;
use crate::folder::{self, Weights};
use crate::header::Entry;
use crate::int8::Rounded;
use crate::layout::{self, Component};
use crate::lora::{Applied, Base, Layer, Lora, LoraBase, LoraReport, Merged};
use crate::pages::{Pages, Span};
use crate::placed::{Placed, Slab};
use crate::synthetic::Synthetic;
use crate::{Error, LinearForm, Result, Vars, index, int8, near, quantise};

/// One or more safetensors or GGUF files read as one set of named tensors, plus the LoRAs laid over it.
///
/// Opening reads the headers only; the data stays in the mapped files and is read when it is used.
#[derive(Debug)]
pub struct WeightSource {
    path: PathBuf,
    files: Vec<WeightFile>,
    /// By name.
    tensors: BTreeMap<String, Placed>,
    metadata: BTreeMap<String, String>,
    loras: Vec<Applied>,
    /// Whether a LoRA may have modules that nothing takes.
    lora_partial: bool,
    /// The type of weights that a LoRA is merged into.
    merged: DType,
    /// Answers for tensors that are in no file.
    synthetic: Option<Synthetic>,
    form: LinearForm,
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
            files: Vec::new(),
            tensors: BTreeMap::new(),
            metadata: BTreeMap::new(),
            loras: Vec::new(),
            lora_partial: false,
            merged: DType::F32,
            synthetic: Some(Synthetic::new(budget)),
            form: LinearForm::Float,
        }
    }

    /// Of a [synthetic](WeightSource::synthetic) source: bytes of the matrices it gave, and of the memory behind them.
    pub fn synthetic_bytes(&self) -> Option<(u64, u64)> {
        self.synthetic.as_ref().map(Synthetic::sizes)
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
            tensors: placed.collect(),
            files,
            metadata,
            loras: Vec::new(),
            lora_partial: false,
            merged: DType::F32,
            synthetic: None,
            form: LinearForm::Float,
        })
    }

    /// Lays a LoRA over the weights, with the user's factor. Several may be added; their updates sum up. Add them
    /// before loading: what was loaded earlier doesn't change.
    pub fn add_lora(&mut self, lora: Lora, weight: f32) {
        self.loras.push(Applied::new(lora, weight));
    }

    /// Takes these LoRAs instead of all that were there.
    pub fn set_loras(&mut self, loras: impl IntoIterator<Item = (Lora, f32)>) {
        self.loras = loras.into_iter().map(|(lora, weight)| Applied::new(lora, weight)).collect();
    }

    /// Whether LoRAs may have modules and keys that nothing takes.
    pub fn set_lora_partial(&mut self, partial: bool) {
        self.lora_partial = partial;
    }

    /// The type of what has to be made for LoRAs that are more than two thin matrices: f32, which is exact, or bf16, which
    /// takes half the memory.
    pub fn set_merged(&mut self, dtype: DType) {
        self.merged = dtype;
    }

    /// In which form linear layers are handed out from now on.
    pub fn set_form(&mut self, form: LinearForm) {
        self.form = form;
    }

    /// A cursor at the top, with an empty prefix.
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

    /// How a tensor is packed; `None` for plain ones. [`WeightSource::entry`] has its shape, and bytes for its type or the
    /// small floats that are scaled.
    pub fn packing(&self, name: &str) -> Option<Format> {
        let entry = &self.tensors.get(name)?.entry;
        entry.coding.format(entry.dtype)
    }

    /// The name of how a tensor is stored: its packing, or its dtype.
    pub fn storage(&self, name: &str) -> Option<&'static str> {
        let packing = self.packing(name).map(Format::name);
        packing.or_else(|| self.entry(name).map(|(dtype, _)| dtype.name()))
    }

    /// Number of elements by how they are stored.
    pub fn storages(&self) -> BTreeMap<&'static str, u64> {
        let mut counts = BTreeMap::new();
        for (name, placed) in &self.tensors {
            *counts.entry(self.storage(name).unwrap_or_default()).or_default() += placed.shape.numel() as u64;
        }
        counts
    }

    /// Whether a GGUF file is read.
    pub fn is_gguf(&self) -> bool {
        self.files.iter().any(WeightFile::is_gguf)
    }

    /// Number of elements of all tensors together, without the scales of 8-bit ones.
    pub fn parameters(&self) -> u64 {
        let is_scale = |name: &str| {
            let weight = name.strip_suffix(int8::SCALE).and_then(|weight| self.entry(weight));
            weight.is_some_and(|(dtype, _)| dtype == DType::I8)
        };
        let counted = self.tensors.iter().filter(|(name, _)| !is_scale(name));
        counted.map(|(_, placed)| placed.shape.numel() as u64).sum()
    }

    /// Bytes of all tensors together.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|placed| placed.range().len() as u64).sum()
    }

    /// Number of elements per dtype.
    pub fn dtypes(&self) -> BTreeMap<DType, u64> {
        let mut counts = BTreeMap::new();
        for Placed { entry, shape, .. } in self.tensors.values() {
            *counts.entry(entry.dtype).or_default() += shape.numel() as u64;
        }
        counts
    }

    /// Bytes that a weight takes on average where a device keeps matrices as they are stored: 2 for bf16, 0.5625 for Q4_K.
    pub fn bytes_per_weight(&self) -> f64 {
        let matrices = || self.tensors.values().filter(|placed| placed.shape.rank() == 2);
        let bytes = |placed: &Placed| match placed.entry.dtype {
            // Rows with scales become the bf16 values they stand for, and nothing is longer than f32.
            DType::I8 if !placed.is_packed() => 2 * placed.shape.numel(),
            DType::F64 => 4 * placed.shape.numel(),
            _ => placed.range().len(),
        };
        let (bytes, weights) =
            matrices().fold((0, 0), |(all, count), m| (all + bytes(m), count + m.shape.numel()));
        if weights == 0 { 0.0 } else { bytes as f64 / weights as f64 }
    }

    /// The parts of a model that it has, and whose names they have.
    pub fn components(&self) -> Vec<(Component, &'static str)> {
        layout::find(self.names()).iter().map(|found| (found.naming.component, found.naming.name)).collect()
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
        for (name, placed) in &self.tensors {
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
        let mut part = self.with_tensors(tensors);
        for (theirs, ours) in layout::SETTINGS {
            let known = self.metadata.iter().find(|(key, _)| key.ends_with(theirs));
            part.metadata.extend(known.map(|(_, value)| (ours.to_owned(), value.clone())));
        }
        Ok(Some(part))
    }

    /// [`WeightSource::open`] of a file or folder that must have this part.
    pub fn open_component(path: impl AsRef<Path>, component: Component) -> Result<WeightSource> {
        let source = WeightSource::open(path)?;
        let missing =
            || Error::OtherComponent { file: source.path.clone(), component, found: source.describe() };
        source.component(component)?.ok_or_else(missing)
    }

    /// What the tensors are, for messages about what they are not.
    pub fn describe(&self) -> String {
        let parts: Vec<String> = self.components().iter().map(|(part, _)| part.to_string()).collect();
        match (layout::relative(self.names()), &parts[..]) {
            (Some(relative), _) => format!("its tensors are those of {relative}"),
            (None, []) => {
                let some: Vec<&str> = self.names().take(3).collect();
                format!("its tensors are of another kind, such as `{}`", some.join("`, `"))
            }
            (None, parts) => format!("it has a {}", parts.join(" and a ")),
        }
    }

    fn with_tensors(&self, tensors: BTreeMap<String, Placed>) -> WeightSource {
        WeightSource {
            path: self.path.clone(),
            files: self.files.clone(),
            tensors,
            metadata: self.metadata.clone(),
            loras: Vec::new(),
            lora_partial: false,
            merged: DType::F32,
            synthetic: None,
            form: LinearForm::Float,
        }
    }

    /// The tensors whose names begin with `prefix` and a dot, under the rest of their names and without the LoRAs: one
    /// part of a model whose parts share a file. `None` when there are none.
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

    /// The scales of an 8-bit tensor, `[rows]`; `None` for other tensors.
    fn scales(&self, name: &str, placed: &Placed) -> Result<Option<HostTensor>> {
        let name = int8::scale_name(name);
        if placed.entry.dtype != DType::I8 || !self.contains(&name) {
            return Ok(None);
        }
        let found = self.find(&name)?;
        let (file, scale) = (self.file_of(found), found.tensor(&self.files, &name)?);
        let rows = int8::row_scales(&placed.shape, &scale).map_err(unusable(file, &name))?;
        rows.map(Some).ok_or_else(|| Error::Shape {
            file: file.path.clone(),
            tensor: name,
            found: scale.shape().clone(),
            expected: placed.shape.dims().get(..1).unwrap_or(&[]).into(),
        })
    }

    /// Whether `name` is stored as 8-bit rows with scales.
    pub fn is_int8(&self, name: &str) -> bool {
        let stored = self.entry(name).is_some_and(|(dtype, _)| dtype == DType::I8);
        stored && self.contains(&int8::scale_name(name))
    }

    /// Whether `name` holds the scales of 8-bit rows.
    pub(crate) fn is_row_scale(&self, name: &str) -> bool {
        name.strip_suffix(int8::SCALE).is_some_and(|weight| self.is_int8(weight))
    }

    /// Lets go of the pages of a tensor after all of it was read.
    pub(crate) fn release(&self, name: &str) {
        if let Some(placed) = self.tensors.get(name) {
            self.file_of(placed).release(&placed.entry);
        }
    }

    /// Whether products with the layer `module` are to be made in 8-bit floats.
    pub(crate) fn is_fp8(&self, module: &str) -> bool {
        match self.form {
            LinearForm::Fp8 => int8::takes(module),
            LinearForm::StoredFp8 => self.stores_fp8(module),
            LinearForm::Float | LinearForm::Int8 { .. } => false,
        }
    }

    /// Whether the weight of the layer `module` is a matrix of 8-bit floats (e4m3).
    pub(crate) fn stores_fp8(&self, module: &str) -> bool {
        let entry = self.entry(&format!("{module}.weight"));
        entry.is_some_and(|(dtype, shape)| dtype == DType::F8E4M3 && shape.rank() == 2)
    }

    /// Whether the layer `module` is to be handed out as 8-bit rows, and how many threads may round it.
    pub(crate) fn int8_threads(&self, module: &str) -> Option<usize> {
        match self.form {
            LinearForm::Int8 { threads } if int8::takes(module) => Some(threads),
            _ => None,
        }
    }

    /// The matrix `name` as 8-bit rows and their scales: as it is stored, else rounded now. What was read for that is let
    /// go of, so that a large model is never in memory in both forms.
    pub(crate) fn int8(&self, name: &str, shape: Shape, threads: usize) -> Result<Rounded> {
        if let Some(synthetic) = &self.synthetic {
            let rounded = synthetic.tensor(name, &shape).and_then(|weight| int8::round(&weight, threads));
            return rounded.map_err(|source| Error::Tensor {
                file: self.path.clone(),
                tensor: name.to_owned(),
                source,
            });
        }
        let placed = self.find_of(name, shape)?;
        let weight = placed.tensor(&self.files, name)?;
        if let Some(scale) = self.scales(name, placed)? {
            return Ok(Rounded { weight, scale, squares: [0.0; 2] });
        }
        let file = self.file_of(placed);
        let rounded = int8::round(&weight, threads).map_err(unusable(file, name))?;
        file.release(&placed.entry);
        Ok(rounded)
    }

    /// A matrix that is not in the file as 8-bit rows.
    pub(crate) fn round(&self, name: &str, weight: &HostTensor, threads: usize) -> Result<Rounded> {
        let unusable = |source| Error::Tensor { file: self.path.clone(), tensor: name.to_owned(), source };
        int8::round(weight, threads).map_err(unusable)
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

    /// Where the tensors whose names begin with `prefix` lie in mapped files, without those that were rounded to 8 bits
    /// when they were loaded and are not read again.
    pub(crate) fn pages(&self, prefix: &str) -> Pages {
        let below = self.tensors.range(prefix.to_owned()..).take_while(|(name, _)| name.starts_with(prefix));
        let span = |(name, placed): (&String, &Placed)| {
            if matches!(self.form, LinearForm::Int8 { .. }) && quantise::rounds(self, name) {
                return None;
            }
            let range = placed.range();
            Some(Span { file: self.file_of(placed).mapped.clone()?, start: range.start, end: range.end })
        };
        Pages::new(below.filter_map(span).collect())
    }

    /// A SHA-256 in hex that stands for these weights in recipes, quick enough for files of many gigabytes.
    ///
    /// It covers the name, dtype, shape and length of every tensor, in the order of names, and of the data all of a
    /// tensor up to 16 KiB and four blocks of 4 KiB of a larger one: its first, its last and two evenly between.
    /// It doesn't cover file names, the division into shards, the order in the file, `__metadata__` or LoRAs. So a
    /// model saved again keeps its fingerprint, any training or conversion changes it, and a few bytes changed in
    /// the middle of a large tensor may go unnoticed: it identifies a file, it doesn't vouch for one.
    pub fn fingerprint(&self) -> Result<String> {
        let parts = self.tensors.iter().flat_map(|(name, placed)| {
            let Placed { entry, shape, .. } = placed;
            let data = &self.file_of(placed).all()[placed.range()];
            let scales = entry.coding.scales().map(|scale| {
                let bytes = self.files[scale.file].bytes(&scale.entry);
                (scale.name.as_str(), scale.entry.dtype, &scale.entry.shape, bytes)
            });
            std::iter::once((name.as_str(), entry.dtype, shape, data)).chain(scales)
        });
        Ok(fingerprint(parts))
    }

    /// The updates of all LoRAs for these linear layers, stacked by rows, as far as they can be added to the output.
    pub(crate) fn deltas(&self, stack: &[(String, usize)], cols: usize) -> Result<Vec<Delta>> {
        let layers = || stack.iter().map(|(name, rows)| Layer { name, rows: *rows, cols });
        let mut deltas = Vec::new();
        for lora in &self.loras {
            deltas.extend(lora.deltas(layers(), &|layer| self.base(layer), self.merged)?);
        }
        Ok(deltas)
    }

    /// Whether a LoRA changes the weight of this layer itself.
    pub(crate) fn merges(&self, module: &str, rows: usize, cols: usize) -> Result<bool> {
        let layer = Layer { name: module, rows, cols };
        for lora in &self.loras {
            if lora.is_merged(layer)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What LoRAs change of the weight of a linear layer itself, and the type of its values then; `None` without such.
    pub(crate) fn merged(
        &self,
        module: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Option<(Arc<Merged>, DType)>> {
        let layer = Layer { name: module, rows, cols };
        let mut merged = Merged::default();
        for lora in &self.loras {
            lora.merge(layer, &|layer| self.base(layer), &mut merged)?;
        }
        if merged.is_empty() {
            return Ok(None);
        }
        // A weight that is stored as f32 stays so exact.
        let exact = self.entry(&format!("{module}.weight")).is_some_and(|(stored, _)| stored == DType::F32);
        Ok(Some((Arc::new(merged), if exact { DType::F32 } else { self.merged })))
    }

    /// The weight of a layer as it is without LoRAs.
    fn base(&self, layer: Layer<'_>) -> Result<Base> {
        let name = format!("{}.weight", layer.name);
        let slabs = self.slabs(&name, [layer.rows, layer.cols].into())?;
        let packed = slabs.into_iter().map(Slab::into_packed).collect::<kiln_tensor::Result<_>>();
        let unusable = |source| Error::Tensor { file: self.path.clone(), tensor: name, source };
        packed.map(Base).map_err(unusable)
    }

    /// Refuses LoRAs that were made for another model, as far as that can be seen before loading.
    pub fn check_loras(&self) -> Result<()> {
        let dim = self.entry("x_embedder.weight").and_then(|(_, shape)| shape.dims().first().copied());
        let model = dim.map(LoraBase::of_dim);
        self.loras.iter().try_for_each(|lora| lora.check(model, self.lora_partial))
    }

    /// To be called after loading: how many of its modules each LoRA brought in. A LoRA with modules that nothing
    /// took is an error that names them, unless [`WeightSource::set_lora_partial`] allows it and some were taken.
    pub fn finish_loras(&self) -> Result<Vec<LoraReport>> {
        self.check_loras()?;
        self.loras.iter().map(|l| l.finish(&self.path, self.lora_partial)).collect()
    }
}

fn unusable(file: &WeightFile, name: &str) -> impl FnOnce(kiln_tensor::Error) -> Error {
    |source| Error::Tensor { file: file.path.clone(), tensor: name.to_owned(), source }
}
