//! A suffix automaton that grows token by token and counts how often each string of bounded length occurred.
//!
//! States are classes of strings that end at the same places (Blumer et al., 1985). Class `v` holds the strings of lengths
//! `len(link(v)) + 1 ..= len(v)`, each a suffix of the next. Counts of all classes would cost a walk over all suffixes for
//! each token, quadratic in a text that repeats one token; here they are kept for strings of at most `context + 1` tokens,
//! for which the walk has at most that many steps.

const NONE: u32 = u32::MAX;
const ROOT: u32 = 0;

#[derive(Clone)]
struct State {
    len: u32,
    link: u32,
    /// Occurrences of its strings; of those of at most `context + 1` tokens.
    count: u32,
    /// Where the last of them ended.
    recent: u32,
    /// (token, state), rising in tokens.
    next: Vec<(u32, u32)>,
}

impl State {
    fn find(&self, token: u32) -> Result<usize, usize> {
        self.next.binary_search_by_key(&token, |&(t, _)| t)
    }

    fn get(&self, token: u32) -> Option<u32> {
        self.find(token).ok().map(|i| self.next[i].1)
    }

    fn set(&mut self, token: u32, state: u32) {
        match self.find(token) {
            Ok(i) => self.next[i].1 = state,
            Err(i) => self.next.insert(i, (token, state)),
        }
    }
}

/// A string of the text that is being continued: its class and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    pub state: u32,
    pub length: u32,
}

/// What followed a string: (token, occurrences), the likeliest first, and occurrences of all tokens.
pub struct Options {
    pub at: Cursor,
    pub tokens: Vec<(u32, u32)>,
    pub total: u32,
}

pub struct Automaton {
    states: Vec<State>,
    context: u32,
    last: u32,
    size: u32,
    /// The suffix of at most `context + 1` tokens.
    tail: Cursor,
}

impl Automaton {
    /// An empty text; strings of up to `context` tokens are looked up.
    pub fn new(context: u32) -> Self {
        let root = State {
            len: 0,
            link: NONE,
            count: 0,
            recent: 0,
            next: Vec::new(),
        };
        Self {
            states: vec![root],
            context,
            last: ROOT,
            size: 0,
            tail: Cursor {
                state: ROOT,
                length: 0,
            },
        }
    }

    /// Tokens of the text.
    pub fn size(&self) -> u32 {
        self.size
    }

    fn state(&self, index: u32) -> &State {
        &self.states[index as usize]
    }

    fn state_mut(&mut self, index: u32) -> &mut State {
        &mut self.states[index as usize]
    }

    /// True for a class of this automaton that holds a string of this length.
    pub fn holds(&self, at: Cursor) -> bool {
        let Some(state) = self.states.get(at.state as usize) else {
            return false;
        };
        let shortest = if state.link == NONE {
            0
        } else {
            self.state(state.link).len + 1
        };
        (shortest..=state.len).contains(&at.length)
    }

    /// The class of the suffix of `length` tokens of a string in `state`.
    fn shortened(&self, mut state: u32, length: u32) -> Cursor {
        while self.state(state).link != NONE && self.state(self.state(state).link).len >= length {
            state = self.state(state).link;
        }
        Cursor { state, length }
    }

    /// Append a token and count the strings that end with it.
    pub fn push(&mut self, token: u32) {
        self.grow(token);
        let before = self.shortened(self.tail.state, self.tail.length.min(self.context));
        if let Some(state) = self.state(before.state).get(token) {
            self.tail = self.shortened(state, before.length + 1);
        }
        self.size += 1;
        let (mut at, end) = (self.tail.state, self.size);
        while at != ROOT {
            let state = self.state_mut(at);
            state.count += 1;
            state.recent = end;
            at = state.link;
        }
    }

    /// The classical construction: amortised constant time.
    fn grow(&mut self, token: u32) {
        let new = self.states.len() as u32;
        let len = self.state(self.last).len + 1;
        self.states.push(State {
            len,
            link: ROOT,
            count: 0,
            recent: 0,
            next: Vec::new(),
        });
        let mut at = self.last;
        self.last = new;
        while at != NONE && self.state(at).get(token).is_none() {
            self.state_mut(at).set(token, new);
            at = self.state(at).link;
        }
        if at == NONE {
            return;
        }
        let Some(found) = self.state(at).get(token) else {
            return;
        };
        if self.state(found).len == self.state(at).len + 1 {
            self.state_mut(new).link = found;
            return;
        }
        let copy = self.states.len() as u32;
        let state = State {
            len: self.state(at).len + 1,
            ..self.state(found).clone()
        };
        self.states.push(state);
        while at != NONE && self.state(at).get(token) == Some(found) {
            self.state_mut(at).set(token, copy);
            at = self.state(at).link;
        }
        self.state_mut(found).link = copy;
        self.state_mut(new).link = copy;
    }

    /// The longest suffix of the text, of at most `context` tokens, that something has followed.
    pub fn matched(&self) -> Cursor {
        self.followed(self.shortened(self.tail.state, self.tail.length.min(self.context)))
    }

    /// The longest suffix of a string that something has followed; the empty string where nothing else did.
    fn followed(&self, mut at: Cursor) -> Cursor {
        while at.state != ROOT && self.state(at.state).next.is_empty() {
            let state = self.state(at.state).link;
            at = Cursor {
                state,
                length: self.state(state).len,
            };
        }
        at
    }

    /// The `most` likeliest tokens after a string, or after its longest suffix that something has followed. The more
    /// frequent come first, of equally frequent ones the more recent.
    pub fn options(&self, at: Cursor, most: usize) -> Options {
        let at = self.followed(at);
        let mut found: Vec<(u32, u32, u32)> = self
            .state(at.state)
            .next
            .iter()
            .map(|&(token, state)| (token, self.state(state).count, self.state(state).recent))
            .collect();
        let total = found.iter().map(|&(_, count, _)| count).sum();
        found.sort_unstable_by_key(|a| std::cmp::Reverse((a.1, a.2)));
        found.truncate(most);
        Options {
            at,
            tokens: found
                .into_iter()
                .map(|(token, count, _)| (token, count))
                .collect(),
            total,
        }
    }

    /// The string and one more token, cut to `context` tokens. Where that never occurred, nothing is matched.
    pub fn step(&self, at: Cursor, token: u32) -> Cursor {
        match self.state(at.state).get(token) {
            Some(state) => self.shortened(state, (at.length + 1).min(self.context)),
            None => Cursor {
                state: ROOT,
                length: 0,
            },
        }
    }
}
