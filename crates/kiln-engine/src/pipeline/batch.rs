//! The requests whose images are made together, and who watches them.

use std::ops::Range;

use kiln_model::{Event, Observer};
use kiln_ops::Backend;

use super::unfinished::Unfinished;
use crate::error::{Error, Result};
use crate::plan::Plan;

/// One request among those whose images are made together.
pub struct Member<'a, B: Backend> {
    /// What is asked for.
    pub plan: &'a Plan,
    /// Hears of this request's images only; an error of its stops this request and no other.
    pub observer: &'a mut dyn Observer<B>,
    /// Takes every image as soon as its work is on the device.
    pub done: &'a mut dyn FnMut(Unfinished<B>) -> Result<()>,
}

/// The members, which of them have ended, and which images are at work.
///
/// A member that stops is noted and hears nothing further; the others go on. As an observer of the transformer it reports to
/// all members at work, and stops the call when none of them is left.
pub(super) struct Batch<'c, 'm, B: Backend> {
    members: &'c mut [Member<'m, B>],
    /// Hears how each member's request ended.
    ended: &'c mut dyn FnMut(usize, Result<()>),
    active: Vec<bool>,
    /// Members with images at work, and which images.
    at_work: Vec<(usize, Range<usize>)>,
}

impl<'c, 'm, B: Backend> Batch<'c, 'm, B> {
    pub(super) fn new(members: &'c mut [Member<'m, B>], ended: &'c mut dyn FnMut(usize, Result<()>)) -> Self {
        let active = vec![true; members.len()];
        Batch { members, ended, active, at_work: Vec::new() }
    }

    /// Whether this member's request has not ended.
    pub(super) fn is_active(&self, member: usize) -> bool {
        self.active[member]
    }

    /// Ends a member's request.
    pub(super) fn end(&mut self, member: usize, result: Result<()>) {
        if std::mem::take(&mut self.active[member]) {
            (self.ended)(member, result);
        }
    }

    /// Takes up work on these images, given as member and number, those of one member one after the other.
    pub(super) fn begin(&mut self, images: impl Iterator<Item = (usize, usize)>) {
        self.at_work.clear();
        for (member, image) in images {
            match self.at_work.last_mut() {
                Some((last, own)) if *last == member => own.end = image + 1,
                _ => self.at_work.push((member, image..image + 1)),
            }
        }
    }

    /// How many images are at work whose members are active.
    fn image_count(&self) -> usize {
        self.at_work.iter().filter(|(member, _)| self.is_active(*member)).map(|(_, own)| own.len()).sum()
    }

    /// The member whose one image is all the work there is. Inside the transformer a tensor holds the rows of all images: it
    /// is shown to one that is alone.
    fn alone(&self) -> Option<usize> {
        match &self.at_work[..] {
            [(member, own)] if own.len() == 1 => Some(*member),
            _ => None,
        }
    }

    /// Calls one member, if it is active. Its error is its end.
    pub(super) fn with(&mut self, member: usize, call: impl FnOnce(&mut Member<'m, B>) -> Result<()>) {
        if self.is_active(member)
            && let Err(error) = call(&mut self.members[member])
        {
            self.end(member, Err(error));
        }
    }

    /// Reports to every member at work, each of its own images: `event` gets their numbers and how many there are in all.
    pub(super) fn report(&mut self, event: impl Fn(&Range<usize>, usize) -> Event) {
        let all = self.image_count();
        for (member, own) in std::mem::take(&mut self.at_work) {
            self.with(member, |m| Ok(m.observer.event(event(&own, all))?));
            self.at_work.push((member, own));
        }
    }

    fn go_on(&self) -> kiln_model::Result<()> {
        if self.image_count() == 0 { Err(kiln_model::Error::Cancelled) } else { Ok(()) }
    }
}

impl<B: Backend> Observer<B> for Batch<'_, '_, B> {
    fn event(&mut self, event: Event) -> kiln_model::Result<()> {
        self.report(|_, _| event.clone());
        self.go_on()
    }

    fn see(&mut self, name: &str, x: &B::Tensor) -> kiln_model::Result<()> {
        if let Some(member) = self.alone() {
            self.with(member, |m| Ok::<_, Error>(m.observer.see(name, x)?));
        }
        self.go_on()
    }

    fn looks_inside(&self) -> bool {
        self.alone().is_some_and(|member| self.members[member].observer.looks_inside())
    }
}
