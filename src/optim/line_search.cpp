#include "optim/line_search.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

namespace fsdp::optim {

namespace {

constexpr double kDecrease = 1e-4, kFlatter = 0.9; // the conditions' constants
constexpr double kSmallestBracket = 1e-9;
constexpr int64_t kMostEvaluations = 25;

// Where the cubic through both points has its minimum, within bounds.
double cubic_minimum(const LinePoint& a, const LinePoint& b, double lowest, double highest) {
  const auto& [left, right] = a.step <= b.step ? std::tie(a, b) : std::tie(b, a);
  const double theta = left.slope + right.slope - 3 * (left.value - right.value) / (left.step - right.step);
  const double square = theta * theta - left.slope * right.slope;
  if (!(square >= 0)) { // or not a number
    return (lowest + highest) / 2;
  }
  const double root = std::sqrt(square);
  const double share = (right.slope + root - theta) / (right.slope - left.slope + 2 * root);
  return std::min(std::max(right.step - (right.step - left.step) * share, lowest), highest);
}

class Search {
 public:
  Search(const LinePoint& start, const std::function<LinePoint(double)>& evaluate)
      : start_(start), evaluate_(evaluate) {}

  LineSearchResult run(double first_step, double largest_in_direction) {
    bracket(first_step);
    while (!found_ && rounds_ < kMostEvaluations && width() * largest_in_direction >= kSmallestBracket) {
      narrow();
    }
    return {std::move(low_), evaluations_};
  }

 private:
  LinePoint at(double step) {
    ++evaluations_;
    return evaluate_(step);
  }
  bool too_high(const LinePoint& point) const {
    return point.value > start_.value + kDecrease * point.step * start_.slope;
  }
  bool flat_enough(const LinePoint& point) const {
    return std::abs(point.slope) <= -kFlatter * start_.slope;
  }
  double width() const {
    return std::abs(high_.step - low_.step);
  }
  void set_bracket(LinePoint a, LinePoint b) {
    low_ = std::move(a);
    high_ = std::move(b);
    low_is_second_ = high_.value < low_.value;
    if (low_is_second_) {
      std::swap(low_, high_);
    }
  }

  // Goes on with bigger steps until the wanted one lies between two.
  void bracket(double first_step) {
    LinePoint before = start_, point = at(first_step);
    for (; rounds_ < kMostEvaluations; ++rounds_) {
      if (too_high(point) || (rounds_ > 1 && point.value >= before.value)) {
        return set_bracket(std::move(before), std::move(point));
      }
      if (flat_enough(point)) {
        found_ = true;
        low_ = std::move(point);
        return;
      }
      if (point.slope >= 0) {
        return set_bracket(std::move(before), std::move(point));
      }
      const double least = point.step + 0.01 * (point.step - before.step), most = point.step * 10;
      const double next = cubic_minimum(before, point, least, most);
      before = std::exchange(point, at(next));
    }
    set_bracket(start_, std::move(point));
  }

  // Near an end of the bracket twice in a row there is no progress: then a tenth of it away from that end.
  double step_within() {
    const auto [left, right] = std::minmax(low_.step, high_.step);
    const double step = cubic_minimum(low_, high_, left, right), margin = 0.1 * (right - left);
    if (std::min(right - step, step - left) >= margin) {
      slow_ = false;
      return step;
    }
    if (!slow_ && step < right && step > left) {
      slow_ = true;
      return step;
    }
    slow_ = false;
    return std::abs(step - right) < std::abs(step - left) ? right - margin : left + margin;
  }

  void narrow() {
    ++rounds_;
    LinePoint point = at(step_within());
    if (too_high(point) || point.value >= low_.value) {
      return low_is_second_ ? set_bracket(std::move(point), std::move(low_)) // of equal values the first is the low end
                            : set_bracket(std::move(low_), std::move(point));
    }
    found_ = flat_enough(point);
    if (!found_ && point.slope * (high_.step - low_.step) >= 0) {
      high_ = std::move(low_);
    }
    low_ = std::move(point);
  }

  const LinePoint& start_;
  const std::function<LinePoint(double)>& evaluate_;
  LinePoint low_, high_; // the ends of the bracket, by their values
  bool low_is_second_ = false; // of the two as they were given
  bool found_ = false;
  bool slow_ = false;
  int64_t rounds_ = 0;
  int64_t evaluations_ = 0;
};

} // namespace

LineSearchResult strong_wolfe(
    const LinePoint& start,
    double first_step,
    double largest_in_direction,
    const std::function<LinePoint(double step)>& evaluate) {
  return Search(start, evaluate).run(first_step, largest_in_direction);
}

} // namespace fsdp::optim
