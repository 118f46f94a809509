//! The queue of work: dispatches and copies are collected and submitted in pieces of bounded length.
//!
//! A driver gives the screen its turn between submissions, so a submission is kept to a budget of arithmetic that takes about a
//! tenth of a second, and launchers split what is longer ([`Budget`]). All work runs in the order of its calls.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kiln_base::lock;
use wgpu::{Buffer, BufferDescriptor, BufferUsages, CommandEncoder, Device, PollType, SubmissionIndex};

use crate::device::{AdapterKind, Gpu};
use crate::kernels::{PARAMS_BYTES, Pipeline};

/// Dispatches of a submission.
const MAX_DISPATCHES: usize = 128;

/// Bytes that are uploaded before waiting for the copies, which hold as much host memory.
const MAX_STAGED: usize = 256 << 20;

/// How long the driver may take for work; longer is an error. A submission is a fraction of a second, but many may be ahead.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Floating-point operations, or an equivalent, that take up to about a tenth of a second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget(pub u64);

impl Budget {
    fn of(kind: AdapterKind) -> Budget {
        Budget(match kind {
            AdapterKind::Discrete | AdapterKind::Virtual => 100_000_000_000,
            AdapterKind::Integrated | AdapterKind::Other => 10_000_000_000,
            // No screen waits for it; the budget keeps commands short enough to be cancelled.
            AdapterKind::Cpu => 2_000_000_000,
        })
    }
}

enum Command {
    Dispatch { pipeline: Arc<Pipeline>, bindings: wgpu::BindGroup, params: u32, groups: [u32; 2] },
    Copy { from: Buffer, from_at: u64, to: Buffer, to_at: u64, bytes: u64 },
}

/// The queue of one device.
pub(crate) struct Queue {
    device: Device,
    queue: wgpu::Queue,
    /// The parameters of the dispatches of the next submission.
    pub params: Buffer,
    pub budget: Budget,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    commands: Vec<Command>,
    params: Vec<u8>,
    cost: u64,
    staged: usize,
}

impl Queue {
    pub fn new(gpu: &Gpu) -> Queue {
        let params = gpu.device.create_buffer(&BufferDescriptor {
            label: Some("params"),
            size: (MAX_DISPATCHES * PARAMS_BYTES) as u64,
            usage: BufferUsages::UNIFORM | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let budget = Budget::of(gpu.adapter.kind);
        Queue {
            device: gpu.device.clone(),
            queue: gpu.queue.clone(),
            params,
            budget,
            state: Mutex::default(),
        }
    }

    /// Appends a dispatch that costs about `cost` operations.
    pub fn dispatch(
        &self,
        pipeline: Arc<Pipeline>,
        bindings: wgpu::BindGroup,
        params: &[u8],
        groups: [u32; 2],
        cost: u64,
    ) {
        let mut state = lock(&self.state);
        let full = state.params.len() >= MAX_DISPATCHES * PARAMS_BYTES;
        if full || state.cost > 0 && state.cost.saturating_add(cost) > self.budget.0 {
            self.submit(&mut state);
        }
        let at = state.params.len();
        state.params.extend_from_slice(params);
        state.params.resize(at + PARAMS_BYTES, 0);
        state.cost += cost;
        state.commands.push(Command::Dispatch { pipeline, bindings, params: at as u32, groups });
    }

    /// Appends a copy; offsets and length are multiples of 4.
    pub fn copy(&self, [from, to]: [&Buffer; 2], [from_at, to_at]: [usize; 2], bytes: usize) {
        let [from_at, to_at, bytes] = [from_at, to_at, bytes].map(|n| n as u64);
        let (from, to) = (from.clone(), to.clone());
        lock(&self.state).commands.push(Command::Copy { from, from_at, to, to_at, bytes });
    }

    /// Writes `bytes`, a multiple of 4, into a buffer, after all work so far.
    pub fn write(&self, to: &Buffer, at: usize, bytes: &[u8]) {
        let mut state = lock(&self.state);
        // wgpu writes before the next submission's commands.
        if !state.commands.is_empty() {
            self.submit(&mut state);
        }
        self.queue.write_buffer(to, at as u64, bytes);
        state.staged += bytes.len();
        if state.staged > MAX_STAGED {
            let index = self.submit(&mut state);
            // An error shows at the next download.
            let _ = self.poll(index);
        }
    }

    /// Submits all work so far.
    pub fn flush(&self) -> SubmissionIndex {
        self.submit(&mut lock(&self.state))
    }

    /// Waits for a submission. An error says that the device is lost, or hangs.
    pub fn poll(&self, index: SubmissionIndex) -> Result<(), String> {
        let wait = PollType::Wait { submission_index: Some(index), timeout: Some(TIMEOUT) };
        self.device.poll(wait).map(|_| ()).map_err(|e| e.to_string())
    }

    fn submit(&self, state: &mut State) -> SubmissionIndex {
        let commands = std::mem::take(&mut state.commands);
        if !state.params.is_empty() {
            self.queue.write_buffer(&self.params, 0, &state.params);
        }
        state.params.clear();
        state.cost = 0;
        state.staged = 0;
        let mut encoder = self.device.create_command_encoder(&Default::default());
        let mut rest = &commands[..];
        while !rest.is_empty() {
            let count = rest.iter().take_while(|command| matches!(command, Command::Dispatch { .. })).count();
            let (dispatches, others) = rest.split_at(count);
            encode_dispatches(&mut encoder, dispatches);
            rest = match others.split_first() {
                Some((Command::Copy { from, from_at, to, to_at, bytes }, rest)) => {
                    encoder.copy_buffer_to_buffer(from, *from_at, to, *to_at, Some(*bytes));
                    rest
                }
                _ => others,
            };
        }
        self.queue.submit([encoder.finish()])
    }
}

fn encode_dispatches(encoder: &mut CommandEncoder, commands: &[Command]) {
    if commands.is_empty() {
        return;
    }
    let mut pass = encoder.begin_compute_pass(&Default::default());
    for command in commands {
        if let Command::Dispatch { pipeline, bindings, params, groups: [x, y] } = command {
            pass.set_pipeline(&pipeline.raw);
            pass.set_bind_group(0, bindings, &[*params]);
            pass.dispatch_workgroups(*x, *y, 1);
        }
    }
}
