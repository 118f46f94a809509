//! An executable CUDA graph with its inputs and output.

use std::ffi::c_void;

use kiln_ops::Tensor as _;

use crate::context::Context;
use crate::error::Result;
use crate::queue::RetainedMemory;
use crate::tensor::{CudaTensor, TensorId};

/// A graph that reads its inputs from fixed tensors.
pub(super) struct Graph {
    /// The context it is launched in.
    cx: Context,
    executable: *mut c_void,
    inputs: Vec<InputSlot>,
    output: CudaTensor,
    /// Other memory it reads and writes.
    _retained: RetainedMemory,
}

// SAFETY: the driver's handles may be used from any thread that has made the context current.
unsafe impl Send for Graph {}

/// The fixed tensor for one input.
struct InputSlot {
    tensor: CudaTensor,
    /// Identity of the tensor last copied into it.
    contents: Option<TensorId>,
}

impl Graph {
    /// Records `work` for inputs of these shapes; `None` if it cannot be captured.
    pub fn record<E>(
        cx: &Context,
        inputs: &[&CudaTensor],
        work: impl FnOnce(&Context, &[&CudaTensor]) -> Result<CudaTensor, E>,
    ) -> Option<Graph> {
        let (recorder, recording) = cx.begin_recording().ok()?;
        let slot = |x: &&CudaTensor| {
            let tensor = CudaTensor::new(&recorder, x.shape(), x.dtype()).ok()?;
            Some(InputSlot { tensor, contents: None })
        };
        let inputs = inputs.iter().map(slot).collect::<Option<Vec<_>>>()?;
        let output = work(&recorder, &inputs.iter().map(|slot| &slot.tensor).collect::<Vec<_>>()).ok()?;
        let (executable, retained) = recording.end().and_then(|mut recorded| recorded.instantiate()).ok()?;
        Some(Graph { cx: cx.clone(), executable, inputs, output, _retained: retained })
    }

    /// Runs the graph on these inputs.
    pub fn replay(&mut self, inputs: &[&CudaTensor]) -> kiln_ops::Result<CudaTensor> {
        let result = CudaTensor::new(&self.cx, self.output.shape(), self.output.dtype())?;
        let launched = self.launch(inputs, &result);
        self.cx.check(launched)?;
        Ok(result)
    }

    fn launch(&mut self, inputs: &[&CudaTensor], result: &CudaTensor) -> Result<()> {
        let cx = &self.cx;
        for (slot, input) in self.inputs.iter_mut().zip(inputs) {
            if slot.contents.as_ref().is_some_and(|held| input.has_id(held)) {
                continue;
            }
            slot.contents = None;
            cx.copy(input.ptr(cx), slot.tensor.ptr(cx), bytes(input))?;
            slot.contents = Some(input.id());
        }
        let stream = cx.stream()?.raw();
        // SAFETY: the graph's memory and everything it reads is retained.
        let launch = || unsafe { (cx.driver().graph_launch)(self.executable, stream) };
        // Its matrix products use the shared workspace, so it must not run between the kernels of another thread's product.
        let status = match cx.shared().gemm.cublaslt() {
            Ok(cublaslt) => cublaslt.with_exclusive_workspace(launch),
            Err(_) => launch(),
        };
        cx.driver().check("cuGraphLaunch", status)?;
        cx.copy(self.output.ptr(cx), result.ptr(cx), bytes(result))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // It may still be running.
        let _ = self.cx.wait();
        // SAFETY: the last use.
        unsafe { (self.cx.driver().graph_exec_destroy)(self.executable) };
    }
}

fn bytes(x: &CudaTensor) -> usize {
    x.shape().numel() * x.dtype().size()
}
