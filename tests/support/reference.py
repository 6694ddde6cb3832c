"""Cache, owners and ranks in plain Python, slow and obvious: the reference for tests of hetmpi.

Ranks step together: all read, then all write, and the owners apply every push before the next read. Rows are lists of
numbers under SGD with learning rate 1, so that integers stay exact. A bound of None is no bound.
"""

WAYS = 32
USES_PER_AGEING = 8  # look-ups per line between two halvings of the scores


def mix64(x):
    """The finaliser of splitmix64."""
    mask = (1 << 64) - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


class Line:
    """A cached row.

    clock   c_c: the owner's clock when the row was fetched, plus own updates since
    age     own updates since it was fetched
    count   own updates since the last push, which `pending` sums
    score, used   the policy's score, and the iteration of the last use
    """

    def __init__(self, key, row, clock, score, used):
        self.key, self.row, self.clock, self.score, self.used = key, list(row), clock, score, used
        self.age = self.count = 0
        self.pending = [0] * len(row)


class Cache:
    """Lines of one rank in sets of at most WAYS."""

    def __init__(self, capacity, policy):
        ways = min(capacity, WAYS)
        self.sets = [[None] * ways for _ in range(capacity // ways if ways else 0)]
        self.capacity, self.policy = ways * len(self.sets), policy
        self.lines = {}  # key -> Line
        self.now = self.num_uses = 0

    def find(self, keys):
        """Look-up of one iteration: key -> Line of the keys that have one; they count as used."""
        self.now += 1
        self.num_uses += len(keys)
        if self.num_uses >= USES_PER_AGEING * self.capacity:
            self.num_uses = 0
            for line in self.lines.values():
                line.score //= 2
        found = {key: self.lines[key] for key in keys if key in self.lines}
        for line in found.values():
            line.used = self.now
            if self.policy == "lfu" or (self.policy == "lfuopt" and line.score < 10):
                line.score += 1
        return found

    def insert(self, key, row, clock):
        """Assigns `key` a line of its set: an empty one, otherwise the one of least score, among equals the least
        recently used, unless all were used in this iteration. Returns the evicted line, or None."""
        if not self.sets:
            return None
        lines = self.sets[(mix64(key) >> 32) * len(self.sets) >> 32]
        idle = [line for line in lines if line is not None and line.used != self.now]
        if None in lines:
            victim = None
        elif idle:
            victim = min(idle, key=lambda line: (line.score, line.used))  # the first of equal ones
        else:
            return None
        if victim is not None:
            del self.lines[victim.key]
        line = Line(key, row, clock, 0 if self.policy == "lru" else 1, self.now)
        lines[lines.index(victim)] = self.lines[key] = line
        return victim


class Owners:
    """The owners' rows and clocks, by key."""

    def __init__(self, rows):
        self.rows, self.clocks = [list(row) for row in rows], [0] * len(rows)
        self.step_sums = {}  # s = 0: key -> sum of this step's gradients over all ranks

    def take(self, key, total, clock):
        """Applies a push: the sum of one rank's gradients, the last of which is its clock-th of this row."""
        self.rows[key] = [value - change for value, change in zip(self.rows[key], total)]
        self.clocks[key] = max(self.clocks[key], clock)

    def settle(self):
        """s = 0: applies the step's gradients once."""
        for key, total in self.step_sums.items():
            self.take(key, total, self.clocks[key] + 1)
        self.step_sums = {}


class MergedRow:
    """A row whose owner merges the pushes of several ranks over the same steps (s >= 1), by any rule, with numbers in
    64 bits. Kept of the last pushes are their steps, the sum of their gradients, and how far these moved the row before
    the division by the root."""

    MOST_PARTS = 8

    def __init__(self, rule, weight, weight_decay, beta1=0.9, beta2=0.999, l1=0.0, l2=0.0):
        """beta1: also the momentum."""
        self.rule, self.decay, self.betas, self.l1, self.l2 = rule, weight_decay, (beta1, beta2), l1, l2
        self.weight = list(weight)
        dim = len(self.weight)
        wide = {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1, "adam": 2 * dim, "momentum": dim, "ftrl": 2 * dim}
        self.state = [0.0] * wide[rule]
        self.z = None  # FTRL's; its state is the slope -(z + weight / eta), and n
        self.parts = []  # (first step, last step, gradients, iterations), by last step
        self.sums, self.moved = [0.0] * dim, [0.0] * dim

    def push(self, grads, first, last, lr):
        """grads: one list per iteration, of one rank, in steps [first, last]; its learning rate is that of `last`."""
        count, steps = len(grads), set(range(first, last + 1))
        if self.parts and last > self.parts[-1][1]:
            self.keep([part for part in self.parts if part[1] >= first])
        overlaps = [len(steps & set(range(part[0], part[1] + 1))) for part in self.parts]
        mass = sum(part[2] for part in self.parts)
        share = sum(part[2] * overlap / (part[1] - part[0] + 1) for part, overlap in zip(self.parts, overlaps)) / (
            mass or 1
        )
        fresh = count * sum(self.untouched(step) for step in steps) / len(steps)
        decays = [self.decay * value for value in self.weight]
        totals = [sum(grad[d] for grad in grads) for d in range(len(decays))]
        values = [total + fresh * decay for total, decay in zip(totals, decays)]
        squares = [  # of gradient and decay, in the iterations that are new; of the gradient in the others
            sum(grad[d] ** 2 for grad in grads) + 2 * decays[d] * totals[d] * fresh / count + fresh * decays[d] ** 2
            for d in range(len(decays))
        ]
        is_older = self.parts and not any(overlaps) and last < self.parts[0][0]
        sums, moved = ([0.0 if is_older else share * v for v in values] for values in (self.sums, self.moved))
        products = [2 / len(steps) * a * b for a, b in zip(sums, values)]
        shared = max([1, *overlaps])
        least = [(a + b) ** 2 / max(count, shared) for a, b in zip(sums, values)]
        moves = self.apply(values, squares, products, least, count, fresh, shared, moved, last, lr)
        if not is_older:
            self.sums = [a + b for a, b in zip(self.sums, values)]
            self.moved = [a + b for a, b in zip(self.moved, moves)]
            self.add((first, last, count, count))

    def untouched(self, step):
        """The chance that no push kept is of this step."""
        chance = 1.0
        for first, last, _, count in self.parts:
            chance *= 1 - count / (last - first + 1) * (first <= step <= last)
        return chance

    def keep(self, parts):
        """Forgets the other parts, with their share of the sums."""
        share = sum(part[2] for part in parts) / sum(part[2] for part in self.parts)
        self.parts = parts
        self.sums, self.moved = ([share * value for value in values] for values in (self.sums, self.moved))

    def add(self, new):
        """Pushes over the same steps are one part; of more than MOST_PARTS the two oldest become one."""
        for i, (first, last, mass, count) in enumerate(self.parts):
            if (first, last) == new[:2]:
                both = count * new[3] / (last - first + 1)
                self.parts[i] = first, last, mass + new[2], count + new[3] - both
                return
        if len(self.parts) == self.MOST_PARTS:
            (first, last, mass, count), (next_first, next_last, next_mass, next_count), *others = self.parts
            first, last = min(first, next_first), next_last
            self.parts = [(first, last, mass + next_mass, min(count + next_count, last - first + 1)), *others]
        self.parts = sorted([*self.parts, new], key=lambda part: part[1])

    def apply(self, values, squares, products, least, count, fresh, shared, moved, step, lr):
        """Updates row and state, which covers at least the squares `least`; the movement `moved` is made anew. Returns
        the movement by the push."""
        dim, (beta1, beta2) = len(values), self.betas
        if self.rule == "sgd":
            self.weight = [row - lr * value for row, value in zip(self.weight, values)]
            return values
        if self.rule == "momentum":
            carried = beta1 * (1 - beta1**fresh) / (1 - beta1)
            taken = (1 - beta1**count) / (1 - beta1) / count
            direct = (1 - beta1 * taken) / (1 - beta1)
            moves = [carried * velocity + direct * value for velocity, value in zip(self.state, values)]
            self.state = [beta1**fresh * velocity + taken * value for velocity, value in zip(self.state, values)]
            self.weight = [row - lr * move for row, move in zip(self.weight, moves)]
            return moves
        if self.rule == "ftrl":
            return self.apply_ftrl(values, squares, products, least, moved, lr)
        if self.rule == "adam":
            carried = beta1 * (1 - beta1**fresh) / (1 - beta1)
            direct = 1 - beta1 * (1 - beta1**count) / (1 - beta1) / count
            moves = [carried * mean + direct * value for mean, value in zip(self.state, values)]
            before = self.state[dim:]
            means = [
                beta1**fresh * mean + (1 - beta1**count) / count * value for mean, value in zip(self.state, values)
            ]
            after = [
                max(
                    (1 - beta2**count) / count * c,
                    beta2**fresh * v + (1 - beta2**count) / count * a + (1 - beta2**shared) / shared * b,
                )
                for v, a, b, c in zip(before, squares, products, least)
            ]
            self.state, lr = means + after, lr / (1 - beta1**step)
            roots = [[(v / (1 - beta2**step)) ** 0.5 + 1e-8 for v in state] for state in (before, after)]
        else:
            moves, before = values, self.state * (dim // len(self.state))
            if self.rule == "rowwise_adagrad":
                squares, products, least = ([sum(numbers) / dim] for numbers in (squares, products, least))
            self.state = [max(c, s + a + b) for s, a, b, c in zip(self.state, squares, products, least)]
            after = self.state * (dim // len(self.state))
            roots = [[v**0.5 + 1e-10 for v in state] for state in (before, after)]
        self.weight = [
            row - lr * ((past + move) / new - past / old)
            for row, past, move, old, new in zip(self.weight, moved, moves, *roots)
        ]
        return moves

    def apply_ftrl(self, values, squares, products, least, moved, lr):
        """As apply(), at a learning rate that never changes: McMahan's z and n, where the row that sigma belongs to is
        that before the pushes of these steps."""
        dim, rows = len(values), self.weight
        before = self.state[dim:]
        after = [max(c, n + a + b) for n, a, b, c in zip(before, squares, products, least)]
        old, new = ([(n**0.5 + 1e-10) / lr for n in state] for state in (before, after))  # 1 / eta
        z = self.z or [-row * inverse for row, inverse in zip(rows, old)]
        self.z = [
            dual + value - (to - at) * (row + way)
            for dual, value, to, at, row, way in zip(z, values, new, old, rows, moved)
        ]
        self.weight = [
            0.0 if abs(dual) <= self.l1 else ((self.l1 if dual > 0 else -self.l1) - dual) / (inverse + self.l2)
            for dual, inverse in zip(self.z, new)
        ]
        self.state = [-(dual + row * inverse) for dual, row, inverse in zip(self.z, self.weight, new)] + after
        return [row - now for row, now in zip(rows, self.weight)]


class Rank:
    """One rank: HET's client."""

    def __init__(self, owners, cache, admitted, far, staleness, anticipate):
        """admitted: keys that may be cached; far: keys that a prefetch fetches, of other nodes."""
        self.owners, self.cache, self.far = owners, cache, far
        self.admitted = admitted if cache.capacity else set()
        self.staleness, self.anticipate = staleness, anticipate
        self.step = 0
        self.requested = None  # key -> the owner's clock, of far keys that a prefetch has requested
        self.early = None  # key -> (row, clock): rows of far keys fetched ahead
        self.left_out = set()  # keys with pushes in transit when clocks were requested
        self.last = []  # keys last read
        self.leaving = []  # pushes not sent yet: (key, sum, clock, iterations summed)
        self.clocks_read = {}  # key -> the owner's clock at the last read
        self.counters = dict.fromkeys(["hits", "stale", "misses", "validated", "evicted", "pushed"], 0)
        self.lags = [0] * 32

    def read(self, keys):
        """One row per key."""
        if self.requested is not None and self.early is None:
            self.order()
        admitted = [key for key in keys if key in self.admitted]
        found = self.cache.find(admitted)
        self.counters["validated"] += 0 if self.staleness is None else len(found)
        self.counters["misses"] += len(admitted) - len(found)
        rows = {}
        for key, line in found.items():
            if self.is_valid(line, counts_lags=True):
                self.counters["hits"] += 1
            else:
                self.counters["stale"] += 1
                self.refresh(line, *self.fetch(key))
        for key in self.early or {}:
            if key not in keys:  # refreshed with the batch
                self.refresh(self.cache.lines[key], *self.early[key])
        for key in [*keys, *(self.early or {})]:
            self.hand_out_if_due(key)
        for key in keys:
            if key in found:
                rows[key] = list(found[key].row)
            else:
                rows[key], self.clocks_read[key] = self.fetch(key)
        for key in admitted:
            if key not in found:
                self.insert(key, rows[key], self.clocks_read[key])
        self.requested = self.early = None
        self.last = keys
        return [rows[key] for key in keys]

    def clock_of(self, key):
        """The owner's clock that a read uses: the prefetched one if the key is far."""
        if self.requested is not None and key in self.requested:
            return self.requested[key]
        return self.owners.clocks[key]

    def is_valid(self, line, counts_lags=False):
        bound, lag = self.staleness, self.clock_of(line.key) - line.clock
        if line.key in (self.early or {}):
            return False  # it is refreshed
        if bound is None:
            return True
        if line.age > bound or lag > bound:
            return False
        if counts_lags:
            self.lags[max(0, lag).bit_length()] += 1
        return True

    def fetch(self, key):
        """Row and clock: as fetched ahead, otherwise the owner's."""
        if self.early is not None and key in self.early:
            return self.early[key]
        return list(self.owners.rows[key]), self.owners.clocks[key]

    def refresh(self, line, row, clock):
        line.row = [value - self.anticipate * change for value, change in zip(row, line.pending)]
        line.clock = clock + line.count
        line.age = 0

    def insert(self, key, row, clock):
        victim = self.cache.insert(key, row, clock)
        if victim is not None:
            self.counters["evicted"] += 1
            self.hand_out(victim)

    def hand_out(self, line):
        if line.count > 0:
            self.leaving.append((line.key, line.pending, line.clock, line.count))
            line.pending, line.count = [0] * len(line.row), 0

    def prefetch(self, keys):
        """Requests clocks of far keys, and of lines whose sums may become due; nothing at s = 0."""
        if self.staleness == 0:
            return
        along, lines = [], self.cache.lines
        if self.staleness is not None:
            along = [
                key for key in self.last if key in lines and lines[key].count >= self.staleness and key not in keys
            ]
        wanted = [key for key in keys + along if key in self.far]
        self.requested = {key: self.owners.clocks[key] for key in wanted}
        if self.staleness is None:
            self.requested = {key: clock for key, clock in self.requested.items() if key not in lines}
        self.next_keys, self.left_out = set(keys), {key for key, *_ in self.leaving}

    def order(self):
        """Fetches the requested rows that the next read needs; other lines if they are due and too old."""
        leaving = self.left_out | {key for key, *_ in self.leaving}
        self.early = {}
        for key, clock in self.requested.items():
            line = self.cache.lines.get(key)
            needed = line is None or not self.is_valid(line)
            if key not in self.next_keys:
                needed = needed and line.count > self.staleness
            if needed and key not in leaving:
                self.early[key] = (list(self.owners.rows[key]), clock)

    def write(self, keys, grads):
        """Writes the gradients of the keys last read."""
        if self.staleness == 0:
            for key, grad in zip(keys, grads):
                before = self.owners.step_sums.get(key, [0] * len(grad))
                self.owners.step_sums[key] = [a + b for a, b in zip(before, grad)]
            self.counters["pushed"] += len(keys)
        else:
            for key, grad in zip(keys, grads):
                self.update(key, grad)
            if self.requested is not None:
                self.order()
            for key in keys:
                if key not in (self.early or {}):  # such a line is refreshed first
                    self.hand_out_if_due(key)
        self.step += 1

    def update(self, key, grad):
        line = self.cache.lines.get(key)
        if line is None:
            self.leaving.append((key, grad, self.clocks_read[key] + 1, 1))
            return
        line.pending = [a + b for a, b in zip(line.pending, grad)]
        line.row = [value - self.anticipate * change for value, change in zip(line.row, grad)]
        line.clock, line.age, line.count = line.clock + 1, line.age + 1, line.count + 1

    def hand_out_if_due(self, key):
        line = self.cache.lines.get(key)
        if line is not None and self.staleness is not None and line.count > self.staleness:
            self.hand_out(line)

    def send(self):
        """Applies the leaving pushes at their owners."""
        for key, total, clock, _ in self.leaving:
            self.owners.take(key, total, clock)
        self.counters["pushed"] += len(self.leaving)
        self.leaving = []

    def flush(self):
        self.requested = self.early = None
        for line in self.cache.lines.values():
            self.hand_out(line)
        self.send()


class RoundRank(Rank):
    """A rank whose pull requests include its pushes for far owners; replies contain clocks and rows."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.held = []  # pushes for the next request, as leaving
        self.sent = []  # pushes of the last request
        self.known = {}  # far key requested -> c_c of a usable line, else None

    def send_near(self):
        """Applies the pushes for this rank's own rows; the others are held."""
        self.counters["pushed"] += len(self.leaving)
        for key, total, clock, _ in self.leaving:
            if key not in self.far:
                self.owners.take(key, total, clock)
        self.held += [entry for entry in self.leaving if entry[0] in self.far]
        self.leaving = []

    def prefetch(self, keys):
        self.send_near()
        self.sent, self.held = self.held, []
        self.known, self.bound_then = {}, self.staleness
        for key in keys:
            line = self.cache.lines.get(key)
            if key in self.far and (line is None or self.staleness is not None):
                is_within = line is not None and line.age + (key in self.last) <= self.staleness
                self.known[key] = line.clock if is_within else None

    def take_answers(self):
        self.requested = {key: self.owners.clocks[key] for key in self.known}
        self.early = {
            key: (list(self.owners.rows[key]), self.owners.clocks[key])
            for key, clock in self.known.items()
            if clock is None or self.owners.clocks[key] > clock + self.bound_then
        }

    def fetch(self, key):
        """The fetched row with held pushes applied; they are sent later with the clock that results."""
        row, clock = super().fetch(key)
        mine = [i for i, (held, *_) in enumerate(self.held) if held == key and key in self.far]
        for i in mine:
            row = [value - self.anticipate * change for value, change in zip(row, self.held[i][1])]
            clock += self.held[i][3]
        for i in mine:
            self.held[i] = key, self.held[i][1], clock, self.held[i][3]
        return row, clock


class Cluster:
    """All ranks in lockstep. Calls take one entry per rank."""

    kind = Rank

    def __init__(self, rows, capacities, policy, admitted, far, staleness, anticipate):
        """rows: initial values, a list per key. capacities, admitted and far: per rank, see Rank."""
        self.owners = Owners(rows)
        self.ranks = [
            self.kind(self.owners, Cache(capacity, policy), *keys, staleness, anticipate)
            for capacity, *keys in zip(capacities, admitted, far)
        ]

    def read(self, keys):
        return [rank.read(mine) for rank, mine in zip(self.ranks, keys)]

    def prefetch(self, keys):
        for rank, mine in zip(self.ranks, keys):
            rank.prefetch(mine)

    def write(self, keys, grads):
        """grads: None for a rank that writes nothing in this step, which s = 0 does not allow."""
        for rank, mine, values in zip(self.ranks, keys, grads):
            if values is not None:
                rank.write(mine, values)
        for rank in self.ranks:
            rank.send()
        self.owners.settle()

    def flush(self):
        for rank in self.ranks:
            rank.flush()


class Rounds(Cluster):
    """Ranks on one node each that announce every batch, with exchange messages, s >= 1."""

    kind = RoundRank

    def write(self, keys, grads):
        for rank, mine, values in zip(self.ranks, keys, grads):
            rank.write(mine, values)
        for rank in self.ranks:
            for key, total, clock, _ in rank.sent:
                self.owners.take(key, total, clock)
        for rank in self.ranks:
            rank.take_answers()
        for rank in self.ranks:
            rank.send_near()

    def flush(self):
        for rank in self.ranks:
            for line in rank.cache.lines.values():
                rank.hand_out(line)
            rank.leaving += rank.held
            rank.send()


class Turns(Rounds):
    """As Rounds, with exchange windows: the ranks announce in their order, and each is answered at once."""

    def prefetch(self, keys):
        for rank, mine in zip(self.ranks, keys):
            rank.prefetch(mine)
            for key, total, clock, _ in rank.sent:
                self.owners.take(key, total, clock)
            rank.take_answers()
            rank.answers, rank.requested, rank.early = (rank.requested, rank.early), None, None  # used by the next read

    def write(self, keys, grads):
        for rank, mine, values in zip(self.ranks, keys, grads):
            rank.write(mine, values)
        for rank in self.ranks:
            rank.requested, rank.early = rank.answers
            rank.send_near()
