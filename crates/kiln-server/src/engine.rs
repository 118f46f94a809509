//! What the server needs of the program around it: a list of models, and somebody who paints.

use std::path::PathBuf;

use kiln_image::Picture;
use serde::Serialize;
use utoipa::ToSchema;

use crate::Order;

/// A model that can be asked for.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct ModelInfo {
    /// Its name.
    pub name: String,
    /// Whether it is taken when none is named.
    pub default: bool,
    /// Sides of a picture when none are asked for.
    pub size: u32,
    /// The sides it knows, where that is not everything: smallest and largest.
    pub sides: Option<(u32, u32)>,
    /// Steps when none are asked for.
    pub steps: u32,
    /// Guidance when none is asked for; absent on models without.
    pub guidance: Option<f32>,
    /// Whether a negative prompt has an effect.
    pub negative: bool,
}

/// What can be asked for. Answers while a picture is painted.
pub trait Catalogue: Send + Sync {
    /// Every model.
    fn models(&self) -> Vec<ModelInfo>;

    /// The names of all LoRAs.
    fn loras(&self) -> Vec<String>;
}

/// An order whose pictures are files.
#[derive(Clone, Debug)]
pub struct Work<'a> {
    /// What is asked for.
    pub order: &'a Order,
    /// Pictures to look at.
    pub references: Vec<PathBuf>,
    /// The picture to start from.
    pub init: Option<PathBuf>,
    /// Where to repaint it.
    pub mask: Option<PathBuf>,
}

/// A part of the work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Waiting for its turn.
    #[default]
    Queue,
    /// The model is read.
    Load,
    /// The prompt is encoded.
    Text,
    /// References are encoded.
    Encode,
    /// Steps.
    Steps,
    /// Latents become a picture.
    Decode,
    /// The file is written.
    Save,
}

impl Phase {
    /// All of them, in order.
    pub const ALL: [Phase; 7] =
        [Phase::Queue, Phase::Load, Phase::Text, Phase::Encode, Phase::Steps, Phase::Decode, Phase::Save];

    /// Its name in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Queue => "queue",
            Phase::Load => "load",
            Phase::Text => "text",
            Phase::Encode => "encode",
            Phase::Steps => "steps",
            Phase::Decode => "decode",
            Phase::Save => "save",
        }
    }
}

/// How far the work is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Which picture, from 0.
    pub picture: u32,
    /// How many pictures there will be.
    pub pictures: u32,
    /// Steps of this picture that are done.
    pub step: u32,
    /// Steps of each picture.
    pub steps: u32,
    /// How much of the whole order is done, from 0 to 1.
    pub fraction: f32,
}

/// A finished picture.
#[derive(Clone, Debug)]
pub struct Painted {
    /// Its number in the order, from 0.
    pub index: u32,
    /// The picture.
    pub picture: Picture,
    /// Its seed, where it has one.
    pub seed: Option<u64>,
    /// How it was made, as JSON.
    pub recipe: String,
}

/// Hears of the work while it is done.
pub trait Watch {
    /// Whether nobody wants the pictures any more. To be asked at least once a step.
    fn cancelled(&self) -> bool;

    /// The steps of `own` pictures of this order begin, of `all` that are painted at once.
    fn together(&mut self, own: u32, all: u32) {
        let _ = (own, all);
    }

    /// Tells how far the work is.
    fn progress(&mut self, progress: Progress);

    /// Something the client should know.
    fn note(&mut self, text: &str);

    /// Whether somebody looks at previews.
    fn wants_preview(&self) -> bool;

    /// What the picture looks like so far.
    fn preview(&mut self, picture: Picture);

    /// Takes a finished picture.
    fn painted(&mut self, painted: Painted) -> Result<(), Trouble>;

    /// The order is done, or there will be no more of it. To be told once, as soon as it is so.
    fn ended(&mut self, result: Result<(), Trouble>);
}

/// An order to be painted, and who hears of it.
pub struct Part<'a> {
    /// What is to be painted.
    pub work: Work<'a>,
    /// Who hears of it, and of nothing else.
    pub watch: &'a mut dyn Watch,
}

/// Whose fault it is that there is no picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The order can't be fulfilled as it is.
    Order,
    /// Something that is not the client's fault.
    Server,
    /// It was cancelled.
    Cancelled,
}

/// Why there is no picture.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Trouble {
    /// Whose fault it is.
    pub blame: Blame,
    /// A stable word for programs, such as `out_of_memory`.
    pub code: &'static str,
    /// A sentence for people.
    pub message: String,
}

impl Trouble {
    /// An order that can't be fulfilled as it is.
    pub fn order(code: &'static str, message: impl Into<String>) -> Trouble {
        Trouble { blame: Blame::Order, code, message: message.into() }
    }

    /// A failure that is not the client's fault.
    pub fn server(code: &'static str, message: impl Into<String>) -> Trouble {
        Trouble { blame: Blame::Server, code, message: message.into() }
    }

    /// The work was cancelled.
    pub fn cancelled() -> Trouble {
        Trouble { blame: Blame::Cancelled, code: "cancelled", message: "cancelled".into() }
    }
}

/// Paints orders, on a thread of its own.
pub trait Painter: Send {
    /// Gets ready for orders that name no model, so that the first one doesn't wait.
    fn warm_up(&mut self) -> Result<(), Trouble> {
        Ok(())
    }

    /// How many pictures like those of this order are painted at once; 1 is one after the other. No order waits for
    /// others: those that are there come together.
    fn room(&mut self, order: &Order) -> u32 {
        let _ = order;
        1
    }

    /// Paints all pictures of these orders, and tells each how it ended. There are several where there was
    /// [`room`](Painter::room) for them; what goes wrong with one is no matter of the others.
    fn paint(&mut self, parts: &mut [Part<'_>]);

    /// Drops what may be in disorder after a panic.
    fn reset(&mut self) {}
}
