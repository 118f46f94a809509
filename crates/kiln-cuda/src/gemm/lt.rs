//! Products by cuBLASLt. A plan (descriptors and the way to compute) is made once for every size; for large ones the
//! library's best guesses are timed, and the winner is kept on disk, so that every run of a machine computes the same.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_tensor::DType;

use super::size::Size;
use crate::cache::Key;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::find::{self, Wanted};
use crate::queue::{Block, Queue};
use crate::sys::cublaslt as sys;
use crate::sys::cublaslt::{Algorithm, CublasLt, Guess};
use crate::sys::driver::DevicePtr;

/// Memory that a way to compute may use beside its operands.
const WORKSPACE: usize = 64 << 20;
/// How many of the library's guesses are timed.
const GUESSES: usize = 8;
/// Bytes to which all operands are aligned.
const ALIGNMENT: u32 = 16;

/// The library and the plans made with it.
pub(crate) struct Lt {
    lib: CublasLt,
    handle: Raw,
    version: usize,
    plans: Mutex<HashMap<Size, Arc<Plan>>>,
    workspace: Mutex<Option<Block>>,
    device: Arc<Device>,
}

#[derive(Clone, Copy)]
struct Raw(*mut c_void);

// SAFETY: the library's handles and descriptors are only read once made, and may be used by any thread.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

struct Plan {
    description: Raw,
    /// Of the weight, the activations, what is added, and the result.
    layouts: [Raw; 4],
    algorithm: Algorithm,
    workspace: usize,
    /// Whether rows of 8-bit floats have scales, which are named before every call.
    scaled: bool,
}

/// Whether a product came with its scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scaled {
    Yes,
    /// The library or the GPU has no scales for rows: the caller applies them.
    No,
}

/// Addresses and factors of one product.
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    pub w: DevicePtr,
    pub x: DevicePtr,
    pub add: Option<DevicePtr>,
    pub out: DevicePtr,
    pub alpha: f32,
    /// Of the rows of the weight and of the activations.
    pub scales: Option<[DevicePtr; 2]>,
}

impl Lt {
    /// Looks for the library.
    pub fn new(device: &Arc<Device>) -> Result<Lt> {
        device.primary.enter()?;
        let lib = CublasLt::new(find::load(Wanted::CublasLt)?)?;
        let mut handle = null_mut();
        // SAFETY: the handle is written.
        let version = unsafe {
            lib.check("cublasLtCreate", (lib.create)(&mut handle))?;
            (lib.version)()
        };
        let (plans, workspace, device) = (Mutex::default(), Mutex::default(), Arc::clone(device));
        Ok(Lt { lib, handle: Raw(handle), version, plans, workspace, device })
    }

    /// The library's name and version.
    pub fn version_text(&self) -> String {
        format!("cuBLASLt {}", self.version)
    }

    /// Whether cuBLASLt is asked for such a product: whole vectors, aligned addresses.
    pub fn takes(size: &Size, operands: &Operands) -> bool {
        let vector = 16 / size.dtype.size();
        let counts = [size.n, size.k, size.ldx, size.ldw, size.ldadd, size.ldo];
        let at = [operands.w, operands.x, operands.add.unwrap_or(0), operands.out];
        counts.iter().all(|n| n % vector == 0) && at.iter().all(|at| at % u64::from(ALIGNMENT) == 0)
    }

    /// Computes a product.
    pub fn run(&self, queue: &Queue, size: &Size, operands: &Operands) -> Result<()> {
        let plan = self.plan(queue, size, operands)?;
        self.call(queue, &plan, &plan.algorithm, plan.workspace, operands)
    }

    /// Computes a product of 8-bit floats, with the scales of the rows of the weight and of the activations, by address.
    pub fn run_scaled(
        &self,
        queue: &Queue,
        size: &Size,
        operands: &Operands,
        scales: [DevicePtr; 2],
    ) -> Result<Scaled> {
        let operands = Operands { scales: Some(scales), ..*operands };
        let plan = self.plan(queue, size, &operands)?;
        self.call(queue, &plan, &plan.algorithm, plan.workspace, &operands)?;
        Ok(if plan.scaled { Scaled::Yes } else { Scaled::No })
    }

    /// Puts work on the stream that uses the workspace, with nobody's product begun and not ended.
    pub fn undisturbed<T>(&self, work: impl FnOnce() -> T) -> T {
        let _held = lock(&self.workspace);
        work()
    }

    fn set_scales(&self, plan: &Plan, scales: [DevicePtr; 2]) -> Result<()> {
        for (which, at) in [sys::DESC_A_SCALE, sys::DESC_B_SCALE].into_iter().zip(scales) {
            // SAFETY: the description lives, and takes an address.
            let status = unsafe { (self.lib.description_set)(plan.description.0, which, value(&at), 8) };
            self.lib.check("cublasLtMatmulDescSetAttribute", status)?;
        }
        Ok(())
    }

    fn call(
        &self,
        queue: &Queue,
        plan: &Plan,
        algorithm: &Algorithm,
        bytes: usize,
        operands: &Operands,
    ) -> Result<()> {
        // Held until the product is on the stream: some are several kernels that hand each other sums in the workspace,
        // and another thread's must not come between them.
        let mut held = lock(&self.workspace);
        let workspace = self.workspace(queue, &mut held)?;
        if let (Some(scales), true) = (operands.scales, plan.scaled) {
            self.set_scales(plan, scales)?;
        }
        let (stream, pointer) = (queue.stream()?.raw(), |at: DevicePtr| at as *mut c_void);
        let beta = if operands.add.is_some() { 1.0f32 } else { 0.0 };
        let [w, x, add, out] = plan.layouts;
        // SAFETY: the layouts describe the operands; the workspace is this product's, and those before it on the stream
        // are done with it.
        let status = unsafe {
            (self.lib.matmul)(
                self.handle.0,
                plan.description.0,
                std::ptr::from_ref(&operands.alpha).cast(),
                pointer(operands.w),
                w.0,
                pointer(operands.x),
                x.0,
                std::ptr::from_ref(&beta).cast(),
                pointer(operands.add.unwrap_or(operands.out)),
                add.0,
                pointer(operands.out),
                out.0,
                algorithm,
                pointer(workspace),
                bytes,
                stream,
            )
        };
        self.lib.check("cublasLtMatmul", status).inspect_err(|_| {
            // Other kernels can stand in, but not in what is to be the same every time.
            let _ = queue.device("cublasLtMatmul");
        })
    }

    fn workspace(&self, queue: &Queue, workspace: &mut Option<Block>) -> Result<DevicePtr> {
        if let Some(block) = workspace {
            return Ok(block.at(queue));
        }
        let none = || Error::Call { call: "cublasLtMatmul", what: "no memory for its workspace".into() };
        // Kept, so it is not to be a recording's.
        queue.device("cuMemAlloc")?;
        let block = queue.memory(WORKSPACE)?.ok_or_else(none)?;
        Ok(workspace.insert(block).at(queue))
    }

    fn plan(&self, queue: &Queue, size: &Size, operands: &Operands) -> Result<Arc<Plan>> {
        // Held while a plan is made: timing two products at once would time neither.
        let mut plans = lock(&self.plans);
        if let Some(plan) = plans.get(size) {
            return Ok(Arc::clone(plan));
        }
        queue.device("cublasLtMatmulAlgoGetHeuristic")?;
        let mut plan = self.describe(size, operands)?;
        match self.choose(queue, size, &plan, operands) {
            Ok((algorithm, workspace)) => (plan.algorithm, plan.workspace) = (algorithm, workspace),
            Err(e) => {
                plan.destroy(&self.lib);
                return Err(e);
            }
        }
        let plan = Arc::new(plan);
        plans.insert(*size, Arc::clone(&plan));
        Ok(plan)
    }

    /// The descriptors. Seen column by column, as the library does, `y = x · wᵀ` is `yᵀ = (wᵀ)ᵀ · xᵀ`.
    fn describe(&self, size: &Size, operands: &Operands) -> Result<Plan> {
        if let Some(scales) = operands.scales {
            let plan = self.describe_as(size, true)?;
            // Older libraries don't know scales of rows, and newer ones not on every GPU.
            let known = self.set_scales(&plan, scales).is_ok();
            if known && self.guesses(&plan, 1).is_ok_and(|guesses| !guesses.is_empty()) {
                return Ok(plan);
            }
            plan.destroy(&self.lib);
        }
        self.describe_as(size, false)
    }

    fn describe_as(&self, size: &Size, scaled: bool) -> Result<Plan> {
        let (input, output) = (kind(size.dtype), kind(size.out));
        let none = Raw(null_mut());
        let mut plan = Plan {
            description: none,
            layouts: [none; 4],
            algorithm: Algorithm::default(),
            workspace: 0,
            scaled,
        };
        let shapes = [
            match size.columns {
                true => (input, size.n, size.k, size.ldw, size.stride_w),
                false => (input, size.k, size.n, size.ldw, size.stride_w),
            },
            (input, size.k, size.rows, size.ldx, 0),
            (output, size.n, size.rows, size.ldadd, size.stride_out),
            (output, size.n, size.rows, size.ldo, size.stride_out),
        ];
        let made = self.fill(&mut plan, shapes, size.batch, !size.columns);
        let made =
            made.and_then(|()| if size.dtype == DType::F8E4M3 { self.eight_bits(&mut plan) } else { Ok(()) });
        if made.is_err() {
            plan.destroy(&self.lib);
        }
        made.map(|()| plan)
    }

    fn fill(
        &self,
        plan: &mut Plan,
        shapes: [(c_int, usize, usize, usize, usize); 4],
        batch: usize,
        transposed: bool,
    ) -> Result<()> {
        let lib = &self.lib;
        let operation = if transposed { sys::OP_T } else { sys::OP_N };
        // SAFETY: the calls write the handles, and read values of the size that is given.
        unsafe {
            let status = (lib.description_create)(&mut plan.description.0, sys::COMPUTE_32F, sys::R_32F);
            lib.check("cublasLtMatmulDescCreate", status)?;
            let status = (lib.description_set)(
                plan.description.0,
                sys::DESC_TRANSA,
                value(&operation),
                size_of::<c_int>(),
            );
            lib.check("cublasLtMatmulDescSetAttribute", status)?;
            for (layout, (kind, rows, cols, ld, stride)) in plan.layouts.iter_mut().zip(shapes) {
                let status = (lib.layout_create)(&mut layout.0, kind, rows as u64, cols as u64, ld as i64);
                lib.check("cublasLtMatrixLayoutCreate", status)?;
                if batch > 1 {
                    let (batch, stride) = (batch as i32, stride as i64);
                    let status = (lib.layout_set)(layout.0, sys::LAYOUT_BATCH_COUNT, value(&batch), 4);
                    lib.check("cublasLtMatrixLayoutSetAttribute", status)?;
                    let status = (lib.layout_set)(layout.0, sys::LAYOUT_BATCH_STRIDE, value(&stride), 8);
                    lib.check("cublasLtMatrixLayoutSetAttribute", status)?;
                }
            }
        }
        Ok(())
    }

    /// What 8-bit floats need: short sums, and scales of rows where the library knows them.
    fn eight_bits(&self, plan: &mut Plan) -> Result<()> {
        let set = |which: c_int, value: *const c_void, size: usize| {
            // SAFETY: the description lives, and the value has that size.
            unsafe { (self.lib.description_set)(plan.description.0, which, value, size) }
        };
        self.lib.check("cublasLtMatmulDescSetAttribute", set(sys::DESC_FAST_SUMS, value(&1i8), 1))?;
        if plan.scaled {
            let modes = [sys::DESC_A_SCALE_MODE, sys::DESC_B_SCALE_MODE];
            plan.scaled = modes.into_iter().all(|mode| set(mode, value(&sys::SCALE_ROWS), 4) == 0);
        }
        Ok(())
    }

    /// The way to compute, and the workspace it needs.
    fn choose(
        &self,
        queue: &Queue,
        size: &Size,
        plan: &Plan,
        operands: &Operands,
    ) -> Result<(Algorithm, usize)> {
        if !size.worth_timing() {
            return first(&self.guesses(plan, 1)?);
        }
        let text = format!("{size:?} {}", plan.scaled);
        let version = self.version.to_string();
        let key = Key::new("product", &[text.as_bytes(), queue.gpu().name.as_bytes(), version.as_bytes()]);
        if let Some(kept) = self.device.cache.get(&key).and_then(|bytes| self.check_kept(plan, &bytes)) {
            return Ok(kept);
        }
        let guesses = self.guesses(plan, GUESSES)?;
        let (algorithm, workspace) = self.fastest(queue, size, plan, operands, &guesses)?;
        self.device.cache.put(&key, bytemuck::bytes_of(&algorithm));
        Ok((algorithm, workspace))
    }

    /// A way that was kept, if this library still knows it.
    fn check_kept(&self, plan: &Plan, bytes: &[u8]) -> Option<(Algorithm, usize)> {
        let algorithm: Algorithm = bytemuck::try_pod_read_unaligned(bytes).ok()?;
        let mut guess = Guess::default();
        let [w, x, add, out] = plan.layouts;
        // SAFETY: the plan's descriptors live; the guess is written.
        let status = unsafe {
            (self.lib.algorithm_check)(
                self.handle.0,
                plan.description.0,
                w.0,
                x.0,
                add.0,
                out.0,
                &algorithm,
                &mut guess,
            )
        };
        (status == 0 && guess.workspace <= WORKSPACE).then_some((algorithm, guess.workspace))
    }

    fn guesses(&self, plan: &Plan, wanted: usize) -> Result<Vec<Guess>> {
        let lib = &self.lib;
        let mut preference = null_mut();
        let mut guesses = vec![Guess::default(); wanted];
        let mut found = 0;
        let [w, x, add, out] = plan.layouts;
        // SAFETY: the preference is made, used and destroyed here; the guesses have room for as many as are wanted.
        unsafe {
            let status = (lib.preference_create)(&mut preference);
            lib.check("cublasLtMatmulPreferenceCreate", status)?;
            (lib.preference_set)(preference, sys::PREF_WORKSPACE, value(&WORKSPACE), size_of::<usize>());
            for operand in 0..4 {
                (lib.preference_set)(preference, sys::PREF_ALIGNMENT_A + operand, value(&ALIGNMENT), 4);
            }
            let status = (lib.heuristic)(
                self.handle.0,
                plan.description.0,
                w.0,
                x.0,
                add.0,
                out.0,
                preference,
                wanted as c_int,
                guesses.as_mut_ptr(),
                &mut found,
            );
            (lib.preference_destroy)(preference);
            lib.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        }
        guesses.truncate(found.max(0) as usize);
        guesses.retain(|guess| guess.state == 0 && guess.workspace <= WORKSPACE);
        Ok(guesses)
    }

    fn fastest(
        &self,
        queue: &Queue,
        size: &Size,
        plan: &Plan,
        operands: &Operands,
        guesses: &[Guess],
    ) -> Result<(Algorithm, usize)> {
        // A product that is added to its own result must not be repeated in place.
        let bytes = size.out_bytes();
        let Some(scratch) = queue.memory(bytes)? else { return first(guesses) };
        let trial = Operands { out: scratch.at(queue), ..*operands };
        let mut best = None;
        for guess in guesses {
            let run = || self.call(queue, plan, &guess.algorithm, guess.workspace, &trial);
            if run().is_err() {
                continue;
            }
            let repeat = || -> Result<()> { (0..4).try_for_each(|_| run()) };
            let milliseconds = queue.time(repeat)?.min(queue.time(repeat)?);
            if best.is_none_or(|(least, _)| milliseconds < least) {
                best = Some((milliseconds, (guess.algorithm, guess.workspace)));
            }
        }
        best.map_or_else(|| first(guesses), |(_, way)| Ok(way))
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        // Its last products may be under way.
        let _ = self.device.stream.wait();
        let plans = std::mem::take(&mut *lock(&self.plans));
        for plan in plans.values() {
            plan.destroy(&self.lib);
        }
        // SAFETY: the last use.
        unsafe { (self.lib.destroy)(self.handle.0) };
    }
}

impl Plan {
    fn destroy(&self, lib: &CublasLt) {
        // SAFETY: the last use; what was not made is null.
        unsafe {
            for layout in self.layouts.iter().filter(|layout| !layout.0.is_null()) {
                (lib.layout_destroy)(layout.0);
            }
            if !self.description.0.is_null() {
                (lib.description_destroy)(self.description.0);
            }
        }
    }
}

fn first(guesses: &[Guess]) -> Result<(Algorithm, usize)> {
    let none = || Error::Call { call: "cublasLtMatmulAlgoGetHeuristic", what: "knows no way".into() };
    guesses.first().map(|guess| (guess.algorithm, guess.workspace)).ok_or_else(none)
}

fn value<T>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}

fn kind(dtype: DType) -> c_int {
    match dtype {
        DType::BF16 => sys::R_16BF,
        DType::F8E4M3 => sys::R_8F_E4M3,
        _ => sys::R_32F,
    }
}
