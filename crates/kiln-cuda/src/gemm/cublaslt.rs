//! Matrix products with cuBLASLt. A plan (descriptors and algorithm) is created once per shape. For large products the
//! heuristic's best candidates are timed and the winner is cached on disk, so that every run on a machine gives the same
//! bits. Timing candidates on a hot, power-throttled GPU chose no better algorithms.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_tensor::DType;

use super::shape::{GemmShape, Operands};
use crate::cache::CacheKey;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::find::{self, CudaLibrary};
use crate::queue::{DeviceBuffer, Queue};
use crate::sys::cublaslt as sys;
use crate::sys::cublaslt::{Algorithm, CublasLt, HeuristicResult};
use crate::sys::driver::DevicePtr;

/// Workspace limit for algorithms.
const WORKSPACE: usize = 64 << 20;
/// Number of candidates to time.
const MAX_CANDIDATES: usize = 8;
/// Alignment of all operands, in bytes.
const ALIGNMENT: u32 = 16;

/// The library and its plans.
pub(crate) struct CublasLtGemm {
    lib: CublasLt,
    handle: Handle,
    version: usize,
    plans: Mutex<HashMap<GemmShape, Arc<Plan>>>,
    workspace: Mutex<Option<DeviceBuffer>>,
    device: Arc<Device>,
}

#[derive(Clone, Copy)]
struct Handle(*mut c_void);

// SAFETY: any thread may use the handles; shared descriptors are only changed while the workspace is locked.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

struct Plan {
    descriptor: Handle,
    /// Of the weight, the activations, the summand and the result.
    layouts: [Handle; 4],
    algorithm: Algorithm,
    workspace: usize,
    /// Whether the product applies row scales; their addresses are set before every call.
    scaled: bool,
}

/// Whether a product applied the row scales, if it has some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowScaling {
    Applied,
    /// Not supported by the library or GPU: the caller applies them.
    Unsupported,
}

impl CublasLtGemm {
    /// Loads the library.
    pub fn new(device: &Arc<Device>) -> Result<CublasLtGemm> {
        device.primary.make_current()?;
        let lib = CublasLt::new(find::load(CudaLibrary::CublasLt)?)?;
        let mut handle = null_mut();
        // SAFETY: the handle is written.
        let version = unsafe {
            lib.check("cublasLtCreate", (lib.create)(&mut handle))?;
            (lib.version)()
        };
        let (plans, workspace, device) = (Mutex::default(), Mutex::default(), Arc::clone(device));
        Ok(CublasLtGemm { lib, handle: Handle(handle), version, plans, workspace, device })
    }

    /// Does what the library does at its first product, which takes 70 ms for each dtype of results.
    pub fn warm_up(&self) -> Result<()> {
        for out in [DType::BF16, DType::F32] {
            let plan = self.create_plan_with(&GemmShape::packed([512; 3], DType::BF16, out, false), false)?;
            let candidates = self.candidates(&plan, 1);
            plan.destroy(&self.lib);
            candidates?;
        }
        Ok(())
    }

    /// The library's name and version.
    pub fn version_text(&self) -> String {
        format!("cuBLASLt {}", self.version)
    }

    /// Whether cuBLASLt takes the product: whole vectors, aligned addresses.
    pub fn supports(shape: &GemmShape, operands: &Operands) -> bool {
        let vector = 16 / shape.dtype.size();
        // The widths of rows in memory.
        let x = if shape.x_is_k_by_rows { shape.rows } else { shape.k };
        let w = if shape.w_is_k_by_n { shape.n } else { shape.k };
        let counts = [shape.n, x, w, shape.ldx, shape.ldw, shape.ldadd, shape.ldo];
        let at = [operands.w, operands.x, operands.add.unwrap_or(0), operands.out];
        matches!(shape.dtype, DType::F32 | DType::BF16 | DType::F8E4M3)
            && operands.bias.is_none()
            && !shape.is_fused()
            && (operands.scales.is_none() || shape.dtype == DType::F8E4M3)
            && counts.iter().all(|n| n % vector == 0)
            && at.iter().all(|at| at % u64::from(ALIGNMENT) == 0)
    }

    /// Runs a product. Row scales may be left to the caller.
    pub fn run(&self, queue: &Queue, shape: &GemmShape, operands: &Operands) -> Result<RowScaling> {
        let plan = self.plan(queue, shape, operands)?;
        self.call(queue, &plan, &plan.algorithm, plan.workspace, operands)?;
        let complete = plan.scaled || operands.scales.is_none();
        Ok(if complete { RowScaling::Applied } else { RowScaling::Unsupported })
    }

    /// Whether [`CublasLtGemm::run`] applies the row scales.
    pub fn applies_scales(&self, queue: &Queue, shape: &GemmShape, operands: &Operands) -> Result<bool> {
        Ok(self.plan(queue, shape, operands)?.scaled || operands.scales.is_none())
    }

    /// Runs `work`, which submits kernels that use the workspace, while no other product is half submitted.
    pub fn with_exclusive_workspace<T>(&self, work: impl FnOnce() -> T) -> T {
        let _held = lock(&self.workspace);
        work()
    }

    fn set_scales(&self, plan: &Plan, scales: [DevicePtr; 2]) -> Result<()> {
        for (which, at) in [sys::DESC_A_SCALE, sys::DESC_B_SCALE].into_iter().zip(scales) {
            // SAFETY: the descriptor lives; the attribute is an address.
            let status = unsafe { (self.lib.descriptor_set)(plan.descriptor.0, which, value(&at), 8) };
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
        // Locked until the product is submitted: some consist of several kernels that communicate through the workspace,
        // and another thread's kernels must not come between them.
        let mut held = lock(&self.workspace);
        let workspace = self.workspace(queue, &mut held)?;
        if let (Some(scales), true) = (operands.scales, plan.scaled) {
            self.set_scales(plan, scales)?;
        }
        let (stream, pointer) = (queue.stream()?.raw(), |at: DevicePtr| at as *mut c_void);
        let beta = if operands.add.is_some() { 1.0f32 } else { 0.0 };
        let [w, x, add, out] = plan.layouts;
        // SAFETY: the layouts describe the operands; earlier products on the stream are done with the workspace by then.
        let status = unsafe {
            (self.lib.matmul)(
                self.handle.0,
                plan.descriptor.0,
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
            // The caller falls back to other kernels, which a recording must not depend on.
            let _ = queue.device("cublasLtMatmul");
        })
    }

    fn workspace(&self, queue: &Queue, workspace: &mut Option<DeviceBuffer>) -> Result<DevicePtr> {
        if let Some(buffer) = workspace {
            return Ok(buffer.ptr(queue));
        }
        let none = || Error::Call { call: "cublasLtMatmul", what: "no memory for its workspace".into() };
        // The memory outlives a recording, so it must not come from one.
        queue.device("cuMemAlloc")?;
        let buffer = queue.allocate(WORKSPACE)?.ok_or_else(none)?;
        Ok(workspace.insert(buffer).ptr(queue))
    }

    fn plan(&self, queue: &Queue, shape: &GemmShape, operands: &Operands) -> Result<Arc<Plan>> {
        // Locked while a plan is created: two products timed at once would disturb each other.
        let mut plans = lock(&self.plans);
        if let Some(plan) = plans.get(shape) {
            return Ok(Arc::clone(plan));
        }
        queue.device("cublasLtMatmulAlgoGetHeuristic")?;
        let mut plan = self.create_plan(shape, operands)?;
        match self.choose_algorithm(queue, shape, &plan, operands) {
            Ok((algorithm, workspace)) => (plan.algorithm, plan.workspace) = (algorithm, workspace),
            Err(e) => {
                plan.destroy(&self.lib);
                return Err(e);
            }
        }
        let plan = Arc::new(plan);
        plans.insert(*shape, Arc::clone(&plan));
        Ok(plan)
    }

    /// Creates the descriptors. In the library's column-major view, `y = x · wᵀ` is `yᵀ = (wᵀ)ᵀ · xᵀ`.
    fn create_plan(&self, shape: &GemmShape, operands: &Operands) -> Result<Plan> {
        if let Some(scales) = operands.scales {
            let plan = self.create_plan_with(shape, true)?;
            // Row scales need a recent library, and not every GPU supports them.
            let accepted = self.set_scales(&plan, scales).is_ok();
            if accepted && self.candidates(&plan, 1).is_ok_and(|candidates| !candidates.is_empty()) {
                return Ok(plan);
            }
            plan.destroy(&self.lib);
        }
        self.create_plan_with(shape, false)
    }

    fn create_plan_with(&self, shape: &GemmShape, scaled: bool) -> Result<Plan> {
        let (input, output) = (cuda_dtype(shape.dtype), cuda_dtype(shape.out_dtype));
        let none = Handle(null_mut());
        let mut plan = Plan {
            descriptor: none,
            layouts: [none; 4],
            algorithm: Algorithm::default(),
            workspace: 0,
            scaled,
        };
        let shapes = [
            if shape.w_is_k_by_n {
                (input, shape.n, shape.k, shape.ldw, shape.stride_w)
            } else {
                (input, shape.k, shape.n, shape.ldw, shape.stride_w)
            },
            if shape.x_is_k_by_rows {
                (input, shape.rows, shape.k, shape.ldx, 0)
            } else {
                (input, shape.k, shape.rows, shape.ldx, 0)
            },
            (output, shape.n, shape.rows, shape.ldadd, shape.stride_out),
            (output, shape.n, shape.rows, shape.ldo, shape.stride_out),
        ];
        let created = self.create_descriptors(
            &mut plan,
            shapes,
            shape.batch,
            [!shape.w_is_k_by_n, shape.x_is_k_by_rows],
        );
        let created = created.and_then(|()| {
            if shape.dtype == DType::F8E4M3 { self.set_fp8_attributes(&mut plan) } else { Ok(()) }
        });
        if created.is_err() {
            plan.destroy(&self.lib);
        }
        created.map(|()| plan)
    }

    fn create_descriptors(
        &self,
        plan: &mut Plan,
        shapes: [(c_int, usize, usize, usize, usize); 4],
        batch: usize,
        transposed: [bool; 2],
    ) -> Result<()> {
        let lib = &self.lib;
        // SAFETY: the calls write the handles and read values of the given sizes.
        unsafe {
            let status = (lib.descriptor_create)(&mut plan.descriptor.0, sys::COMPUTE_32F, sys::R_32F);
            lib.check("cublasLtMatmulDescCreate", status)?;
            for (attribute, transposed) in [sys::DESC_TRANSA, sys::DESC_TRANSB].into_iter().zip(transposed) {
                let operation = if transposed { sys::OP_T } else { sys::OP_N };
                let (at, bytes) = (value(&operation), size_of::<c_int>());
                let status = (lib.descriptor_set)(plan.descriptor.0, attribute, at, bytes);
                lib.check("cublasLtMatmulDescSetAttribute", status)?;
            }
            for (layout, (cuda_dtype, rows, cols, ld, stride)) in plan.layouts.iter_mut().zip(shapes) {
                let status =
                    (lib.layout_create)(&mut layout.0, cuda_dtype, rows as u64, cols as u64, ld as i64);
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

    /// Sets what fp8 needs: fast accumulation, and row scales where supported.
    /// Exact accumulation was no more accurate (Ember's latents are off from f32 by 9 to 20 % either way) and took 7 % longer.
    fn set_fp8_attributes(&self, plan: &mut Plan) -> Result<()> {
        let set = |attribute: c_int, value: *const c_void, size: usize| {
            // SAFETY: the descriptor lives, and the value has that size.
            unsafe { (self.lib.descriptor_set)(plan.descriptor.0, attribute, value, size) }
        };
        self.lib.check("cublasLtMatmulDescSetAttribute", set(sys::DESC_FAST_ACCUM, value(&1i8), 1))?;
        if plan.scaled {
            let modes = [sys::DESC_A_SCALE_MODE, sys::DESC_B_SCALE_MODE];
            plan.scaled = modes.into_iter().all(|mode| set(mode, value(&sys::SCALE_OUTER_VEC), 4) == 0);
        }
        Ok(())
    }

    /// Returns the algorithm and its workspace size.
    fn choose_algorithm(
        &self,
        queue: &Queue,
        shape: &GemmShape,
        plan: &Plan,
        operands: &Operands,
    ) -> Result<(Algorithm, usize)> {
        if !shape.is_worth_timing() {
            return first_candidate(&self.candidates(plan, 1)?);
        }
        let text = format!("{shape:?} {}", plan.scaled);
        let version = self.version.to_string();
        let key =
            CacheKey::new("product", &[text.as_bytes(), queue.gpu().name.as_bytes(), version.as_bytes()]);
        if let Some(cached) = self.device.cache.get(&key).and_then(|bytes| self.check_cached(plan, &bytes)) {
            return Ok(cached);
        }
        let candidates = self.candidates(plan, MAX_CANDIDATES)?;
        let (algorithm, workspace) = self.fastest(queue, shape, plan, operands, &candidates)?;
        self.device.cache.put(&key, bytemuck::bytes_of(&algorithm));
        Ok((algorithm, workspace))
    }

    /// Returns a cached algorithm if this library accepts it.
    fn check_cached(&self, plan: &Plan, bytes: &[u8]) -> Option<(Algorithm, usize)> {
        let algorithm: Algorithm = bytemuck::try_pod_read_unaligned(bytes).ok()?;
        let mut candidate = HeuristicResult::default();
        let [w, x, add, out] = plan.layouts;
        // SAFETY: the plan's descriptors live; the result is written.
        let status = unsafe {
            (self.lib.algorithm_check)(
                self.handle.0,
                plan.descriptor.0,
                w.0,
                x.0,
                add.0,
                out.0,
                &algorithm,
                &mut candidate,
            )
        };
        (status == 0 && candidate.workspace <= WORKSPACE).then_some((algorithm, candidate.workspace))
    }

    fn candidates(&self, plan: &Plan, limit: usize) -> Result<Vec<HeuristicResult>> {
        let lib = &self.lib;
        let mut preference = null_mut();
        let mut candidates = vec![HeuristicResult::default(); limit];
        let mut found = 0;
        let [w, x, add, out] = plan.layouts;
        // SAFETY: the preference is destroyed here; there is space for `limit` candidates.
        unsafe {
            let status = (lib.preference_create)(&mut preference);
            lib.check("cublasLtMatmulPreferenceCreate", status)?;
            (lib.preference_set)(preference, sys::PREF_WORKSPACE, value(&WORKSPACE), size_of::<usize>());
            for operand in 0..4 {
                (lib.preference_set)(preference, sys::PREF_ALIGNMENT_A + operand, value(&ALIGNMENT), 4);
            }
            let status = (lib.heuristic)(
                self.handle.0,
                plan.descriptor.0,
                w.0,
                x.0,
                add.0,
                out.0,
                preference,
                limit as c_int,
                candidates.as_mut_ptr(),
                &mut found,
            );
            (lib.preference_destroy)(preference);
            lib.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        }
        candidates.truncate(found.max(0) as usize);
        candidates.retain(|candidate| candidate.state == 0 && candidate.workspace <= WORKSPACE);
        Ok(candidates)
    }

    fn fastest(
        &self,
        queue: &Queue,
        shape: &GemmShape,
        plan: &Plan,
        operands: &Operands,
        candidates: &[HeuristicResult],
    ) -> Result<(Algorithm, usize)> {
        // Use scratch memory: a product that accumulates into its result cannot be repeated in place.
        let bytes = shape.out_bytes();
        let Some(scratch) = queue.allocate(bytes)? else { return first_candidate(candidates) };
        let trial = Operands { out: scratch.ptr(queue), ..*operands };
        let mut best = None;
        for candidate in candidates {
            let run = || self.call(queue, plan, &candidate.algorithm, candidate.workspace, &trial);
            if run().is_err() {
                continue;
            }
            let milliseconds = queue.time_repeated(run)?;
            if best.is_none_or(|(least, _)| milliseconds < least) {
                best = Some((milliseconds, (candidate.algorithm, candidate.workspace)));
            }
        }
        best.map_or_else(|| first_candidate(candidates), |(_, algorithm)| Ok(algorithm))
    }
}

impl Drop for CublasLtGemm {
    fn drop(&mut self) {
        // The last products may still be running.
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
        // SAFETY: the last use; handles that were not created are null.
        unsafe {
            for layout in self.layouts.iter().filter(|layout| !layout.0.is_null()) {
                (lib.layout_destroy)(layout.0);
            }
            if !self.descriptor.0.is_null() {
                (lib.descriptor_destroy)(self.descriptor.0);
            }
        }
    }
}

fn first_candidate(candidates: &[HeuristicResult]) -> Result<(Algorithm, usize)> {
    let none = || Error::Call { call: "cublasLtMatmulAlgoGetHeuristic", what: "no algorithm found".into() };
    candidates.first().map(|candidate| (candidate.algorithm, candidate.workspace)).ok_or_else(none)
}

fn value<T>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}

fn cuda_dtype(dtype: DType) -> c_int {
    match dtype {
        DType::BF16 => sys::R_16BF,
        DType::F8E4M3 => sys::R_8F_E4M3,
        _ => sys::R_32F,
    }
}
